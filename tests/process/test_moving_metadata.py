"""`insitu repair --metadata` on loopback hosts, with a real etcd."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import INSITU, LoopbackHosts, insitu, is_running, wait_until
from etcd_servers import ETCD, Etcd, needs_etcd

from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_member import stop_member
from insitu.cluster.wire.records import read_head, read_holder
from insitu.grid import Catalog
from insitu.metadata import read_settings

pytestmark = [needs_etcd, pytest.mark.slow]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHosts]:
    monkeypatch.setenv("INSITU_ETCD", ETCD or "")
    hosts = LoopbackHosts(tmp_path, ("a", "b", "c"))
    with contextlib.closing(hosts):
        yield hosts
    for home in hosts.homes.values():
        insitu(home, "down", code=None)
        hosts.close()
        stop_member(Paths(home), delete=False)


def fill(hosts: LoopbackHosts, folder: Path, name: str) -> None:
    (folder / f"{name}.csv").write_text("x\n1\n2\n3\n")
    insitu(hosts.head, "import", name, str(folder / f"{name}.csv"), "--backups", "1")
    (folder / "file").write_text(name)
    insitu(hosts.head, "fs", "cp", str(folder / "file"), f"insitu://v/{name}")


def check(home: Path, *names: str) -> None:
    assert [cache.name for cache in Catalog(Paths(home)).caches()] == list(names)
    for name in names:
        insitu(home, "describe", name, "--verify")
        assert insitu(home, "fs", "cat", f"insitu://v/{name}").stdout == name


def repair(home: Path, *arguments: str, code: int = 0) -> str:
    return " ".join(insitu(home, "repair", "--metadata", *arguments, code=code).stderr.split())


def has_members(hosts: LoopbackHosts) -> list[bool]:
    return [read_holder(Paths(home).etcd_file("lock")) is not None for home in hosts.homes.values()]


def test_a_cluster_moves_to_an_etcd_and_back(hosts: LoopbackHosts, tmp_path: Path) -> None:
    with contextlib.closing(Etcd(tmp_path / "etcd").wait()) as etcd:
        hosts.up()
        fill(hosts, tmp_path, "one")
        assert "Run `insitu down` first" in repair(hosts.head, etcd.url, "--yes", code=2)
        insitu(hosts.head, "down")
        assert "Give --yes" in repair(hosts.head, etcd.url, code=1)
        said = repair(hosts.head, etcd.url, "--yes")
        assert f"to {etcd.url}: " in said and "All is there" in said
        hosts.up()
        check(hosts.head, "one")
        fill(hosts, tmp_path, "two")
        assert all(read_settings(Paths(home)) is not None for home in hosts.homes.values())
        # Another head appears by itself now.
        before = read_head(Paths(hosts.head))
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)

        def find_next() -> Path | None:
            for home in hosts.homes.values():
                record = read_head(Paths(home))
                if record is not None and record.epoch > before.epoch and is_running(record.pid):
                    alive = [n for n in hosts.nodes(home).values() if n["state"] == "alive"]
                    return home if len(alive) == 3 else None
            return None

        check(wait_until(find_next, "another head"), "one", "two")
        insitu(next(home for home in hosts.homes.values() if read_head(Paths(home))), "down")
        said = repair(hosts.head, "embedded", "--yes")
        assert f"From {etcd.url} to" in said
        hosts.up()
        check(hosts.head, "one", "two")
        # Agents have let go of etcd, also the one that had a head.
        assert all(read_settings(Paths(home)) is None for home in hosts.homes.values())
    insitu(hosts.head, "down", "--force")


def test_a_cluster_moves_to_an_etcd_that_insitu_runs_and_back(hosts: LoopbackHosts, tmp_path: Path) -> None:
    commands = ("--hosts", str(hosts.file), "--launcher", "env HOST={host} sh -c", "--insitu", INSITU)
    hosts.up()
    fill(hosts, tmp_path, "one")
    insitu(hosts.head, "down")
    assert "Give --hosts FILE" in repair(hosts.head, "etcd", "--yes", code=2)
    assert "Give --yes" in repair(hosts.head, "etcd", *commands, code=1) and not any(has_members(hosts))
    assert repair(hosts.head, "etcd", "--yes", *commands).count("a member of etcd serves at") == 3
    assert not any(has_members(hosts))
    hosts.up()
    assert all(has_members(hosts))
    check(hosts.head, "one")
    fill(hosts, tmp_path, "two")
    insitu(hosts.head, "down")
    assert "Give --hosts FILE" in repair(hosts.head, "embedded", "--yes", code=2)
    assert "All is there" in repair(hosts.head, "embedded", "--yes", *commands)
    hosts.up()
    check(hosts.head, "one", "two")
    wait_until(lambda: not any(has_members(hosts)), "the end of members")
    insitu(hosts.head, "down", "--force")
    assert not any(Paths(home).etcd.exists() for home in hosts.homes.values())
