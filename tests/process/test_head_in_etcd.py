"""Heads that etcd elects, as processes on the loopback interface, with a real etcd."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import insitu, is_running, wait_until
from etcd_hosts import EtcdHosts
from etcd_servers import Etcd, needs_etcd

from insitu.base.errors import GridError, HeadReplaced
from insitu.base.paths import Paths
from insitu.cluster.wire.pins import release_pins
from insitu.cluster.wire.records import HeadRecord, read_head
from insitu.grid import Catalog
from insitu.metadata import Put, open_fenced, read_settings

pytestmark = [needs_etcd, pytest.mark.long]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EtcdHosts]:
    with contextlib.closing(EtcdHosts(tmp_path, ("a", "b"))) as found:
        yield found


def import_numbers(home: Path, folder: Path, name: str, *options: str, code: int = 0) -> str:
    np.save(folder / f"{name}.npy", np.arange(100))
    return " ".join(
        insitu(home, "import", name, str(folder / f"{name}.npy"), *options, code=code).stderr.split()
    )


def list_caches(home: Path) -> list[str]:
    return [cache.name for cache in Catalog(Paths(home)).caches()]


def read_log(home: Path) -> str:
    return Paths(home).head_log.read_text()


def test_another_head_appears_by_itself_and_knows_all_that_was_acknowledged(
    hosts: EtcdHosts, tmp_path: Path
) -> None:
    before = hosts.begin()
    import_numbers(hosts.head, tmp_path, "kept", "--backups", "1")
    import_numbers(hosts.head, tmp_path, "gone")
    insitu(hosts.head, "delete", "--yes", "gone")
    (tmp_path / "file").write_text("what it holds")
    insitu(hosts.head, "fs", "cp", str(tmp_path / "file"), "insitu://v/file")
    os.kill(before.pid, signal.SIGKILL)
    home, record = hosts.wait_for_head(before)
    assert home != hosts.head and list_caches(home) == ["kept"]
    insitu(home, "describe", "kept", "--verify")
    assert insitu(hosts.homes["b"], "fs", "cat", "insitu://v/file").stdout == "what it holds"
    import_numbers(home, tmp_path, "more")
    # Commands in the home of before name the head, and change nothing.
    said = " ".join(insitu(hosts.head, "nodes").stderr.split())
    assert f"The head at {record.address} has replaced the one of this home" in said
    refused = import_numbers(hosts.head, tmp_path, "late", code=1)
    assert f"whose head the one at {record.address} has replaced" in refused
    refused = " ".join(hosts.up(code=1).stderr.split())
    assert f"the one at {record.address} leads. Run the command on the machine of that head" in refused
    assert f"the one at {record.address} leads" in " ".join(insitu(hosts.head, "down", code=1).stderr.split())
    # The next one is killed, too.
    os.kill(record.pid, signal.SIGKILL)
    last, _ = hosts.wait_for_head(record)
    assert list_caches(last) == ["kept", "more"]
    other = next(each for each in hosts.homes.values() if each != last)
    assert read_head(Paths(other)) is None  # it is the home of an agent again
    assert "2 agents ended" in insitu(last, "down").stderr


def test_a_head_that_was_suspended_changes_nothing_once_another_leads_and_ends(
    hosts: EtcdHosts, tmp_path: Path
) -> None:
    before = hosts.begin()
    import_numbers(hosts.head, tmp_path, "kept")
    Catalog(Paths(hosts.head)).pin("kept", 1, "job-of-before")
    os.kill(before.pid, signal.SIGSTOP)
    home, record = hosts.wait_for_head(before)
    late = open_fenced(Paths(hosts.head))
    assert late is not None
    with contextlib.closing(late), pytest.raises(HeadReplaced, match=f"the one at {record.address}"):
        late.transact([], [Put("a", b"1")], secrets.token_hex(16))
    with pytest.raises(GridError, match=f"the one at {record.address}"):
        Catalog(Paths(hosts.head)).delete("kept")
    os.kill(before.pid, signal.SIGCONT)
    wait_until(lambda: not is_running(before.pid), "the end of the head of before")
    said = read_log(hosts.head)
    assert (
        f"the one at {record.address} leads: this one ends" in said
        or f"the head at {record.address} has replaced this one" in said
    )
    refused = import_numbers(hosts.head, tmp_path, "late", code=1)
    assert f"whose head the one at {record.address} has replaced" in refused
    found = read_head(Paths(hosts.head))
    assert found is not None and found.replaced_by == record.address
    assert hosts.find_head(before.epoch) == (home, record) and list_caches(home) == ["kept"]
    # A job there keeps what it reads until it ends.
    refused = " ".join(insitu(home, "delete", "--yes", "kept", code=2).stderr.split())
    assert "used by job-of-before" in refused and "`insitu delete job-of-before`" in refused
    release_pins(Paths(hosts.head), "job-of-before")
    insitu(home, "delete", "--yes", "kept")


@pytest.mark.slow
def test_a_head_whose_etcd_is_silent_changes_nothing_until_it_answers(
    hosts: EtcdHosts, tmp_path: Path
) -> None:
    before = hosts.begin()
    import_numbers(hosts.head, tmp_path, "kept")
    hosts.etcd.silence(0)
    wait_until(lambda: "Nothing is changed until it does" in read_log(hosts.head), "the message")
    assert is_running(before.pid)
    assert "etcd must answer" in import_numbers(hosts.head, tmp_path, "late", code=1)
    assert list_caches(hosts.head) == ["kept"]
    assert set(hosts.states().values()) == {"alive"}  # who asks gets answers
    hosts.etcd.resume(0)
    home, _ = hosts.wait_for_head(HeadRecord("", epoch=before.epoch - 1))  # the same one or another one
    import_numbers(home, tmp_path, "more")
    assert list_caches(home) == ["kept", "more"]


@pytest.mark.slow
def test_no_single_process_matters(tmp_path: Path) -> None:
    """The member of etcd that leads the others is killed together with the head."""
    with contextlib.closing(EtcdHosts(tmp_path, ("a", "b"), members=3)) as hosts:
        before = hosts.begin()
        import_numbers(hosts.head, tmp_path, "kept", "--backups", "1")
        hosts.etcd.processes[hosts.etcd.find_leader()].kill()
        os.kill(before.pid, signal.SIGKILL)
        home, _ = hosts.wait_for_head(before)
        assert list_caches(home) == ["kept"]
        import_numbers(home, tmp_path, "more")
        assert list_caches(home) == ["kept", "more"]


@pytest.mark.slow
def test_down_ends_a_cluster_and_up_begins_it_again(hosts: EtcdHosts, tmp_path: Path) -> None:
    url = hosts.etcd.url
    other = Etcd(tmp_path / "other").wait()
    before = hosts.begin()
    refused = hosts.up("--metadata", other.url, code=2).stderr
    other.close()
    assert "keeps the metadata store that it was made with" in " ".join(refused.split())
    import_numbers(hosts.head, tmp_path, "kept")
    assert "2 agents ended" in insitu(hosts.head, "down").stderr
    hosts.up()  # the store is known
    record = read_head(Paths(hosts.head))
    assert record is not None and record.epoch > before.epoch and list_caches(hosts.head) == ["kept"]
    assert "a runs already" in hosts.up("--metadata", url).stderr
    insitu(hosts.head, "down", "--force")
    count = hosts.etcd.ask(0, "kv/range", {"key": "AA==", "range_end": "AA==", "count_only": True})["count"]
    assert int(count) == 1  # that of the test
    homes = [Paths(each) for each in (hosts.head, *hosts.homes.values())]
    assert not any(paths.metadata_settings.exists() or paths.fence.exists() for paths in homes)
    assert read_settings(homes[0]) is None


def test_up_says_what_is_wrong_with_an_etcd_and_a_person_replaces_no_head(
    hosts: EtcdHosts, tmp_path: Path
) -> None:
    assert "Received: --metadata without it" in " ".join(
        insitu(hosts.head, "up", "--metadata", hosts.etcd.url, code=2).stderr.split()
    )
    hosts.etcd.silence(0)
    assert "Most members of etcd must answer" in " ".join(
        hosts.up("--metadata", hosts.etcd.url, code=1).stderr.split()
    )
    assert not Paths(hosts.head).head.exists()
    hosts.etcd.resume(0)
    before = hosts.begin()
    os.kill(before.pid, signal.SIGKILL)
    refused = " ".join(hosts.move_head(tmp_path / "new", "a", code=2).stderr.split())
    assert f"metadata is in {hosts.etcd.url}, where an agent starts the next head by itself" in refused
