"""The supervisor's end of a connection to a host's server; tests/process/test_host_jobs.py has both ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.progress import Progress
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines import Channel, ChannelClosed, Ended, NodeState, ProcessState
from insitu.cluster.engines.engine import Command
from insitu.cluster.hosts_engine import host_link
from insitu.cluster.hosts_engine.host_link import HostLink
from insitu.cluster.job_backup.folder_copies import scan_folder

W0 = TaskId("worker", 0)
SPEC = TaskSpec(W0, NodeId("a"))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[HostLink, Channel]]:
    ours, its = socket.socketpair()
    server = Channel(its)
    link = HostLink(NodeId("a"), Channel(ours), JobPaths(tmp_path), None, shares_folder=False)
    yield link, server
    link.abandon()
    server.close()


def launch(link: HostLink, server: Channel) -> None:
    server.send({"pid": 7})
    assert link.launch(SPEC, Command(("python",), {})) == 7


def test_reports_are_kept_and_times_are_of_this_host(ends: tuple[HostLink, Channel]) -> None:
    link, server = ends
    record = Progress(1, 2, 3, 4.5, "gradient", True, 1)  # 4.5 s old
    progress = [["worker:0", list(astuple(record))]]
    server.send(
        {"report": {"progress": progress, "processes": [["worker:0", [False, 5, 0.5]]], "node": [9, True]}}
    )
    before = time.monotonic()
    link.wait(1.0)
    found = link.progress[W0]
    assert (found.epoch, found.step, found.place, found.elastic) == (1, 2, "gradient", True)
    assert before - 4.5 <= found.at <= time.monotonic() - 4.5
    assert link.processes == {W0: ProcessState(False, 5, 0.5)} and link.state == NodeState(9, True)


def test_the_reason_of_an_end_comes_with_it(ends: tuple[HostLink, Channel]) -> None:
    link, server = ends
    launch(link, server)
    failure = {
        "type": "ValueError",
        "message": "no \udcff",
        "fingerprint": "f",
        "peer_lost": False,
        "final": False,
        "mistake": True,
    }
    server.send({"ended": "worker:0", "code": 1, "failure": failure})
    assert link.wait(1.0) == [Ended(W0, 1)]
    assert link.failures[W0].type == "ValueError" and link.failures[W0].message == "no \\udcff"
    assert link.failures[W0].mistake and not link.failures[W0].final


def test_files_are_written_and_known_to_be_there(ends: tuple[HostLink, Channel], tmp_path: Path) -> None:
    link, server = ends
    server.send({"file": "ledger/a.json", "start": 0, "part": "bmV3", "last": True})
    link.wait(1.0)
    assert (tmp_path / "ledger" / "a.json").read_text() == "new"
    assert link.held == scan_folder(tmp_path, {}) != {}
    server.send({"removed": ["ledger/a.json"]})
    link.wait(1.0)
    assert link.held == scan_folder(tmp_path, {}) == {}


def test_a_host_that_says_nothing_is_given_up_and_its_tasks_count_as_killed(
    ends: tuple[HostLink, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, server = ends
    launch(link, server)
    link.check_silence()
    assert not link.is_lost
    monkeypatch.setattr(host_link, "SILENT_SECONDS", -1.0)
    link.check_silence()
    assert link.is_lost and link.given_up
    assert link.wait(0.0) == [Ended(W0, -9)]
    with pytest.raises(ClusterError, match="a can't be reached"):
        link.launch(SPEC, Command(("python",), {}))


def test_what_came_while_nobody_looked_counts(
    ends: tuple[HostLink, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, server = ends
    link.heard -= 100.0
    server.send({"report": {}})
    link.check_silence()
    assert not link.is_lost


def test_the_connection_ends_though_another_process_has_its_descriptor(
    ends: tuple[HostLink, Channel],
) -> None:
    link, server = ends
    copy = socket.socket(fileno=socket.dup(link.fileno()))
    with copy:
        link.abandon()
        with pytest.raises(ChannelClosed):
            server.receive()


@pytest.mark.parametrize(
    "message",
    [
        {"report": 5},
        {"report": {"progress": [["worker:0", [0] * 20]]}},
        {"report": {"node": [1, 2, 3]}},
        {"output": "nobody", "data": "eA=="},
        {"output": "worker:0", "data": 5},
        {"ended": "worker:0", "code": "none"},
        {"ended": "worker:0", "code": 1, "failure": {"x": 1}},
        {"file": "../x", "start": 0, "part": "", "last": True},
        {"file": "ledger/a", "start": 10**400, "part": "", "last": True},
        {"removed": [7]},
        {"removed": 7},
        {"report": {"progress": [["worker:0", ["1"]]]}},
        {"report": {"progress": [["worker:0", [10**40]]]}},
        {"report": {"progress": [["worker:0", [0, 0, -1]]]}},
        {"report": {"progress": [["worker:0", [0, 0, 0, 0.0, "\ud800"]]]}},
        {"report": {"progress": [["worker:0", [0, 0, 0, float("nan"), "gradient"]]]}},
        {"report": {"node": ["1", True], "processes": []}},
        {"report": {"node": [1, True], "processes": [["worker:0", [False, 5, "1"]]]}},
        {"ended": "worker:0", "code": 10**400},
        {"ended": "worker:0", "code": 1, "failure": {"type": 5, "message": "", "fingerprint": ""}},
        {"ended": "worker:1", "code": 0},
        {"output": "worker:1", "data": "eA=="},
        {"wanted": "\ud800"},
        {"wanted": 7},
        {"wanted_refresh": "1"},
        {"wanted_refresh": -1},
    ],
)
def test_what_cannot_be_understood_costs_a_host_its_tasks_and_no_more(
    ends: tuple[HostLink, Channel], message: dict[str, object]
) -> None:
    """It ended the supervisor, and the job."""
    link, server = ends
    launch(link, server)
    server.send(message)
    assert link.wait(1.0) == [Ended(W0, -9)] and link.is_lost


def test_epochs_that_tasks_wait_for_are_kept(ends: tuple[HostLink, Channel]) -> None:
    link, server = ends
    launch(link, server)
    server.send({"wanted_refresh": 3})
    assert link.wait(1.0) == [] and link.wanted_refreshes == [3]


def test_answers_that_nobody_has_asked_for_do_not_fill_the_memory(ends: tuple[HostLink, Channel]) -> None:
    link, server = ends
    for _ in range(50):
        server.send({})
    link.wait(1.0)
    assert link.is_lost


@pytest.mark.parametrize("answer", [{}, {"pid": "x"}, {"pid": None}, {"addresses": {}}])
def test_an_answer_of_another_kind_costs_a_host_its_tasks_and_no_more(
    ends: tuple[HostLink, Channel], answer: dict[str, object]
) -> None:
    link, server = ends
    server.send(answer)
    with pytest.raises(ClusterError, match="a can't be reached"):
        link.launch(SPEC, Command(("python",), {}))
    assert link.is_lost


@pytest.mark.parametrize("answer", [{}, {"addresses": 5}, {"addresses": {"nobody": "x"}}, {"addresses": {}}])
def test_addresses_of_other_tasks_are_none(ends: tuple[HostLink, Channel], answer: dict[str, object]) -> None:
    link, server = ends
    server.send(answer)
    with pytest.raises(ClusterError, match="a can't be reached"):
        link.reserve([SPEC])
    assert link.is_lost
    with pytest.raises(ClusterError, match="a can't be reached"):
        link.take_answer("address", str)


def test_a_task_that_ends_before_the_answer_to_its_launch_is_read_has_ended(
    ends: tuple[HostLink, Channel],
) -> None:
    link, server = ends
    server.send({"pid": 7})
    server.send({"ended": "worker:0", "code": 0})
    assert link.launch(SPEC, Command(("python",), {})) == 7
    assert link.wait(1.0) == [Ended(W0, 0)]


def test_a_file_that_could_not_be_written_is_asked_for_again(
    ends: tuple[HostLink, Channel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, server = ends
    monkeypatch.setattr(host_link, "_RETRY_SECONDS", -1.0)
    (tmp_path / "ledger").write_text("no folder")
    server.send({"file": "ledger/a.json", "start": 0, "part": "bmV3", "last": True})
    link.wait(1.0)
    link.beat()
    assert server.receive() == [{"do": "beat"}, {"do": "again", "path": "ledger/a.json"}]
    link.beat()
    assert server.receive() == [{"do": "beat"}] and not link.is_lost
