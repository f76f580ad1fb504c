"""An etcd that insitu runs itself, on loopback hosts, with real binaries."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import LoopbackHosts, insitu, is_running, wait_until
from etcd_servers import ETCD, needs_etcd

from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_member import stop_member
from insitu.cluster.failover.etcd_record import read_member
from insitu.cluster.wire.records import read_head, read_holder
from insitu.grid import Catalog
from insitu.metadata import HEAD_KEY, open_etcd, read_leader, read_settings

pytestmark = [needs_etcd, pytest.mark.slow]


@pytest.fixture(autouse=True)
def binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_ETCD", ETCD or "")


class OwnEtcdHosts(LoopbackHosts):
    """Hosts on the loopback interface, of which up to three have a member."""

    def member_pid(self, name: str) -> int:
        """Return the process of a host's member; 0: none runs."""
        holder = read_holder(Paths(self.homes[name]).etcd_file("lock"))
        return 0 if holder is None else holder.process.pid

    def close(self) -> None:
        for home in self.homes.values():
            insitu(home, "down", code=None)
        super().close()
        for home in self.homes.values():
            stop_member(Paths(home), delete=False)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[OwnEtcdHosts]:
    with contextlib.closing(OwnEtcdHosts(tmp_path, ("a", "b", "c", "d"))) as found:
        yield found


def import_numbers(home: Path, folder: Path, name: str) -> None:
    np.save(folder / f"{name}.npy", np.arange(100))
    insitu(home, "import", name, str(folder / f"{name}.npy"))


def list_caches(home: Path) -> list[str]:
    return [cache.name for cache in Catalog(Paths(home)).caches()]


def test_three_hosts_run_an_etcd_until_down_and_again(hosts: OwnEtcdHosts, tmp_path: Path) -> None:
    said = hosts.up("--metadata", "etcd").stderr
    assert said.count("a member of etcd serves at 127.0.0.1:") == 3
    assert [bool(hosts.member_pid(name)) for name in "abcd"] == [True, True, True, False]
    import_numbers(hosts.head, tmp_path, "kept")
    settings = read_settings(Paths(hosts.head))
    assert settings is not None and settings.peers.count("https://") == 3
    # A member that is killed comes back by its agent, with the same data and address.
    killed = hosts.member_pid("a")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: hosts.member_pid("a") not in (0, killed), "the next process of the member")
    # One that continues without its agent is found by the next agent.
    kept = hosts.member_pid("b")
    os.kill(hosts.agent_pid("b"), signal.SIGKILL)
    assert "a runs already" in hosts.up("--metadata", "etcd").stderr
    assert hosts.member_pid("b") == kept
    before = {name: hosts.member_pid(name) for name in "abc"}
    assert "4 agents ended" in insitu(hosts.head, "down").stderr
    assert not any(map(is_running, before.values())) and not any(map(hosts.member_pid, "abcd"))
    members = {name: read_member(Paths(hosts.homes[name])) for name in "abc"}
    said = hosts.up().stderr
    assert said.count("a member of etcd serves at") == 3 and list_caches(hosts.head) == ["kept"]
    assert {name: read_member(Paths(hosts.homes[name])) for name in "abc"} == members
    insitu(hosts.head, "down", "--force")
    assert not any(map(hosts.member_pid, "abcd"))
    assert not any(Paths(home).etcd.exists() for home in hosts.homes.values())
    assert not Paths(hosts.head).metadata_settings.exists()


def test_the_host_of_the_head_is_lost_with_its_member_and_others_go_on(
    hosts: OwnEtcdHosts, tmp_path: Path
) -> None:
    hosts.up("--metadata", "etcd")
    import_numbers(hosts.head, tmp_path, "kept")
    before = read_head(Paths(hosts.head))
    assert before is not None
    for pid in (hosts.agent_pid("a"), hosts.member_pid("a"), before.pid):
        os.kill(pid, signal.SIGKILL)
    others = [hosts.homes[name] for name in "bcd"]

    def find_next() -> Path | None:
        for home in others:
            record = read_head(Paths(home))
            if record is not None and record.epoch > before.epoch and is_running(record.pid):
                return home
        return None

    home = wait_until(find_next, "another head")
    wait_until(lambda: list_caches(home) == ["kept"], "what was acknowledged")
    # On its machine `insitu down` ends members, too, though it has started none.
    pids = [hosts.member_pid(name) for name in "bc"]
    wait_until(lambda: sum(n["state"] == "alive" for n in hosts.nodes(home).values()) == 3, "agents")
    insitu(home, "down", code=1)  # which names the host that is lost
    wait_until(lambda: not any(map(is_running, pids)), "the end of members")


def test_who_does_not_know_the_token_can_not_connect(hosts: OwnEtcdHosts, tmp_path: Path) -> None:
    hosts.up("--metadata", "etcd")
    member = read_member(Paths(hosts.homes["a"]))
    assert member is not None
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    for address in (member.client, member.peer):
        for url, context in ((f"http://{address}/version", None), (f"https://{address}/version", blind)):
            with pytest.raises((OSError, ValueError)):
                urllib.request.urlopen(url, timeout=10, context=context).read()
    files = [path for path in Paths(hosts.homes["a"]).etcd.iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert ETCD is not None
    token = Paths(hosts.head).token.read_text().strip()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert token not in listed
    # A member that was wiped isn't taken back as if it were the one of before.
    stop = hosts.member_pid("c")
    shutil.rmtree(Paths(hosts.homes["c"]).etcd_file("data"))
    os.kill(stop, signal.SIGKILL)
    log = Paths(hosts.homes["c"]).agent_log("c")
    wait_until(lambda: "A member of etcd needs its data" in log.read_text(), "the refusal")
    assert not hosts.member_pid("c")
    said = " ".join(insitu(hosts.head, "nodes").stderr.split())
    assert "etcd: 2 of 3 members answer" in said and "Its host's etcd/log may say why" in said
    import_numbers(hosts.head, tmp_path, "more")


def test_one_host_runs_one_member_and_says_so(tmp_path: Path) -> None:
    with contextlib.closing(OwnEtcdHosts(tmp_path, ("a", "b"))) as hosts:
        said = hosts.up("--metadata", "etcd").stderr
        assert "one member, on the first host" in said
        assert hosts.member_pid("a") and not hosts.member_pid("b")
        settings = read_settings(Paths(hosts.head))
        assert settings is not None
        with contextlib.closing(open_etcd(settings)) as store:
            leader = read_leader(store.get([HEAD_KEY])[0].get(HEAD_KEY))
        assert leader is not None and leader.address
        assert "whose etcd insitu runs itself" in hosts.up("--metadata", "etcd://127.0.0.1:1", code=2).stderr


def test_what_can_not_be_started_is_refused_at_up(
    hosts: OwnEtcdHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INSITU_ETCD", "/nowhere/etcd")
    said = " ".join(hosts.up("--metadata", "etcd", code=1).stderr.split())
    assert "INSITU_ETCD=/nowhere/etcd, which is no program" in said and "etcd-server" in said
    old = tmp_path / "old-etcd"
    old.write_text("#!/bin/sh\necho 'etcd Version: 3.3.27'\n")
    old.chmod(0o700)
    monkeypatch.setenv("INSITU_ETCD", str(old))
    assert "etcd Version: 3.3.27" in hosts.up("--metadata", "etcd", code=1).stderr
    assert not Paths(hosts.head).head.exists() and not Paths(hosts.head).metadata_settings.exists()
    said = insitu(hosts.head, "up", "--hosts", str(hosts.file), "--head-only", "--metadata", "etcd", code=2)
    assert "Start etcd yourself" in " ".join(said.stderr.split())
    # A cluster that has begun without etcd keeps its store.
    hosts.up()
    monkeypatch.setenv("INSITU_ETCD", ETCD or "")
    assert "keeps the metadata store" in hosts.up("--metadata", "etcd", code=2).stderr
