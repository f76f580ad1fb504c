"""The shell around the decisions, with an engine that does as it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.cluster import Request, controller, submission, submit
from insitu.cluster.controller import Controller
from insitu.cluster.engine import Command, Ended, Output, SignalName
from insitu.cluster.journal import Journal
from insitu.errors import ClusterError
from insitu.paths import JobPaths
from insitu.spec import TaskId, TaskSpec

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


class ScriptedEngine:
    """Plays `happenings`, one batch for each wait. A signalled task ends of it at the next wait."""

    def __init__(self, *happenings: list[Output | Ended]) -> None:
        self._happenings = list(happenings)
        self.launched: list[TaskId] = []
        self.signals: list[tuple[TaskId, str]] = []
        self.refuses: set[TaskId] = set()
        self.closed = False

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        return {spec.task: f"127.0.0.1:{20_000 + i}" for i, spec in enumerate(tasks)}

    def launch(self, task: TaskSpec, command: Command) -> None:
        if task.task in self.refuses:
            raise ClusterError(f"no room for {task.task}")
        self.launched.append(task.task)

    def signal(self, task: TaskId, name: SignalName) -> None:
        self.signals.append((task, name))
        if name == "term":
            self._happenings.insert(0, [Ended(task, -15)])

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        return self._happenings.pop(0) if self._happenings else []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def wake() -> Iterator[int]:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    yield reader
    os.close(reader)
    os.close(writer)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    insitu = Insitu(tmp_path)
    insitu.script("")
    monkeypatch.setattr(submission, "_start_controller", lambda job, lock: None)
    request = Request("data/train", insitu.folder, ("train.py",), workers=2, max_restarts=0)
    return insitu.job(submit(insitu.paths, request))


def run(job: JobPaths, engine: ScriptedEngine, wake: int) -> int:
    made = Controller(job, engine, wake)
    try:
        return made.run()
    finally:
        made.close()


def test_output_and_ends_become_logs_and_a_journal(job: JobPaths, wake: int) -> None:
    engine = ScriptedEngine(
        [Output(W0, b"one\ntw"), Output(W1, b"x\n")], [Output(W0, b"o"), Ended(W0, 0)], [Ended(W1, 0)]
    )
    assert run(job, engine, wake) == 0
    assert engine.launched == [W0, W1] and engine.closed
    assert job.output.read_bytes() == (
        b"[worker:0] one\n[worker:1] x\n[worker:0] two\n[insitu] job finished\n"
    )
    assert job.task_log(W0, 1).read_bytes() == b"one\ntwo"
    assert Journal(job.journal).state().phase == "finished"


def test_tasks_that_cannot_be_launched_take_the_others_with_them(job: JobPaths, wake: int) -> None:
    engine = ScriptedEngine()
    engine.refuses = {W1}
    assert run(job, engine, wake) == 1
    assert engine.signals == [(W0, "term")]
    assert "worker:1 could not be started: no room for worker:1" in Journal(job.journal).state().reason


class FullDisk:
    """Stands in for `Journal.record`; refuses the first `times` calls."""

    def __init__(self, journal: Journal, times: float) -> None:
        self._record = journal.record
        self.times = times
        self.refused = 0

    def __call__(self, *entry: object) -> None:
        if self.refused < self.times:
            self.refused += 1
            raise ClusterError("The job's journal can't be used: database or disk is full")
        self._record(*entry)  # type: ignore[arg-type]


def test_a_full_disk_does_not_end_a_job(job: JobPaths, wake: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "RETRY_PAUSE", 0.001)
    made = Controller(job, ScriptedEngine([Ended(W0, 0)], [Ended(W1, 0)]), wake)
    full = FullDisk(made._journal, 7)
    monkeypatch.setattr(made._journal, "record", full)
    assert made.run() == 0
    made.close()
    assert full.refused == 7
    events = [entry.event["event"] for entry in Journal(job.journal).entries()]
    assert events == ["Created", "Submitted", "TaskExited", "TaskExited"]
    assert Journal(job.journal).state().phase == "finished"


def test_a_disk_that_stays_full_is_an_error_in_the_end(
    job: JobPaths, wake: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_PAUSE", 0.001)
    monkeypatch.setattr(controller, "PATIENCE", 0.01)
    made = Controller(job, ScriptedEngine([Ended(W0, 0)], [Ended(W1, 0)]), wake)
    monkeypatch.setattr(made._journal, "record", FullDisk(made._journal, float("inf")))
    with pytest.raises(ClusterError, match="disk is full"):
        made.run()
    made.close()
