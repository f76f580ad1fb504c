"""What is kept on disk about a job: journal, lock, ports held, logs followed."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from insitu import ports
from insitu.cluster.client.status import find_job, list_job_ids
from insitu.cluster.decide.events import (
    SubmittedEvent,
    TaskExitedEvent,
)
from insitu.cluster.decide.job import advance, new_job
from insitu.cluster.job_files.journal import Journal
from insitu.cluster.job_files.lock import is_locked, signal_controller, take_lock, write_controller_pid
from insitu.cluster.job_files.logs import JobLogs, MergedLog
from insitu.cluster.job_files.tail import follow
from insitu.errors import ClusterError, UnknownJob
from insitu.paths import JobPaths, Paths
from insitu.ports import candidate_ports, hold_port
from insitu.spec import NodeId, TaskId, TaskSpec

W0 = TaskId("worker", 0)


def test_the_journal_tells_every_event_and_the_last_state(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    state = new_job([TaskSpec(W0, NodeId("node-0"))], 1)
    journal.create(state)
    for at, event in enumerate((SubmittedEvent(), TaskExitedEvent(W0, -9, progress=(0, 1)))):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    assert Journal(journal.path).state() == state
    created, submitted, exited = journal.entries()
    assert created.event == {"event": "Created"}
    assert submitted.actions == [
        {"action": "Publish", "generation": 1},
        {"action": "Launch", "tasks": ["worker:0"]},
    ]
    assert exited.event["task"] == "worker:0" and exited.event["code"] == -9


@pytest.mark.parametrize("content", [None, b"no database at all, but long enough to look at"])
def test_a_journal_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "journal.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ClusterError, match="journal"):
        Journal(path).state()
    assert path.exists() == (content is not None)


def test_the_lock_is_held_until_its_last_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    assert not is_locked(path)
    lock = take_lock(path)
    assert is_locked(path)
    with pytest.raises(ClusterError, match="locked"):
        take_lock(path)
    inherited = os.dup(lock)
    os.close(lock)
    assert is_locked(path)
    os.close(inherited)
    assert not is_locked(path)


def test_the_holder_is_signalled_and_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    lock = take_lock(path)
    write_controller_pid(lock)
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    try:
        assert signal_controller(path, signal.SIGUSR2)
        assert received == [signal.SIGUSR2]
        os.close(lock)
        assert not signal_controller(path, signal.SIGUSR2)
        assert len(received) == 1
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_ports_lie_outside_the_range_that_the_system_gives_away() -> None:
    assert candidate_ports((32768, 60999)) == range(15000, 32768)
    assert candidate_ports((1024, 20000)) == range(20001, 65000)
    assert len(candidate_ports((1, 65535))) == 0


def test_held_ports_are_distinct_and_nobody_else_gets_them() -> None:
    held = [hold_port("127.0.0.1") for _ in range(20)]
    try:
        numbers = {h.getsockname()[1] for h in held}
        assert len(numbers) == 20
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", numbers.pop()))
    finally:
        for one in held:
            one.close()


def test_without_room_beside_the_ephemeral_range_the_system_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything = tmp_path / "range"
    everything.write_text("1 65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", everything)
    with hold_port("127.0.0.1") as held:
        assert held.getsockname()[1] > 0


def test_an_address_that_is_not_this_machines_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1"):
        hold_port("192.0.2.1")


def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"one\ntw")
    steps = iter([b"o\nthree\n", b"rest"])

    def over() -> bool:
        """Writes on at each look; over once there is nothing to add."""
        more = next(steps, None)
        with path.open("ab") as file:
            file.write(more or b"")
        return more is None

    assert [line for lines in follow(path, over, poll_interval=0) for line in lines] == [
        b"one",
        b"two",
        b"three",
        b"rest",
    ]


def test_logs_keep_the_raw_bytes_and_merge_whole_lines(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    logs.write(W0, b"a\nb", 0.0)
    MergedLog(job).log("note")
    logs.write(W0, b"c\nd", 0.0)
    logs.finish()
    assert job.task_log(W0, 1).read_bytes() == b"a\nbc\nd"
    assert job.output.read_bytes() == b"[worker:0] a\n[insitu] note\n[worker:0] bc\n[worker:0] d\n"


def test_output_lost_to_a_full_disk_is_told_once_there_is_room(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    whole = logs._merged
    with open("/dev/full", "ab", buffering=0) as full:
        logs._merged = full
        logs.write(W0, b"lost\n", 0.0)
    logs._merged = whole
    logs.write(W0, b"kept\n", 0.0)
    logs.finish()
    first, second = job.output.read_bytes().splitlines()
    assert b"16 bytes of output could not be written" in first and second == b"[worker:0] kept"


def test_jobs_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    assert list_job_ids(paths) == []
    for name in ("digits-aa11", "digits-aa11b", "digits-bb22", ".staged"):
        (paths.jobs / name).mkdir(parents=True)
    assert find_job(paths, "digits-b").root.name == "digits-bb22"
    assert find_job(paths, "digits-aa11").root.name == "digits-aa11"
    with pytest.raises(UnknownJob, match="could be any of these"):
        find_job(paths, "digits")
    with pytest.raises(UnknownJob, match="Did you mean digits-bb22"):
        find_job(paths, "digit-bb22")
    for text in ("", ".staged", "../x"):
        with pytest.raises(UnknownJob):
            find_job(paths, text)
