"""The shell around the decisions, with an engine that does as it is told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.progress import ProgressWriter, read_progress
from insitu.base.roster import Roster, read_roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster import submit
from insitu.cluster.client import submission
from insitu.cluster.control import controller
from insitu.cluster.control.controller import Controller
from insitu.cluster.control.request_inbox import JobRequest
from insitu.cluster.control.supervised_tasks import TaskExit
from insitu.cluster.decide.events import (
    SubmittedEvent,
    TaskExitedEvent,
)
from insitu.cluster.decide.job import advance
from insitu.cluster.engines.channel import Message
from insitu.cluster.engines.engine import Command, NodeState, ProcessState, SignalName
from insitu.cluster.engines.task_files import TaskFiles
from insitu.cluster.job_files import journal
from insitu.cluster.job_files.journal import Journal
from insitu.options import JobOptions

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


class ScriptedTasks(TaskFiles):
    """Plays `happenings`, one batch for each wait. A signalled task ends of it at the next wait."""

    def __init__(
        self, job: JobPaths, *happenings: list[TaskExit], running: Mapping[TaskId, int] | None = None
    ) -> None:
        super().__init__(job)
        self._happenings = list(happenings)
        self._running = running or {}
        self._ports = 20_000
        self.launched: list[TaskId] = []
        self.environments: list[dict[str, str]] = []
        self.attempts: list[tuple[TaskId, int]] = []
        self.signals: list[tuple[TaskId, str]] = []
        self.acknowledged: list[TaskExit] = []
        self.refuses: set[TaskId] = set()
        self.standbys = 0

    def running(self) -> dict[TaskId, tuple[int, int]]:
        return {task: (incarnation, 1) for task, incarnation in self._running.items()}

    def published_roster(self) -> Roster | None:
        return read_roster(self._job.roster)

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        return {}

    def node_states(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeState]:
        return {}

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        self._ports += len(tasks)
        return {task.task: f"127.0.0.1:{self._ports - i}" for i, task in enumerate(tasks)}

    def launch(self, task: TaskSpec, incarnation: int, command: Command) -> int:
        if task.task in self.refuses:
            raise ClusterError(f"no room for {task.task}")
        self.launched.append(task.task)
        self.environments.append(command.environment)
        self.attempts.append((task.task, incarnation))
        return 100 + len(self.launched)

    def signal(self, task: TaskId, name: SignalName) -> None:
        self.signals.append((task, name))
        if name == "term":
            incarnation = max(a for t, a in self.attempts if t == task)
            self._happenings.insert(0, [TaskExit(task, incarnation, -15)])

    def keep_standby(self, count: int, command: Command) -> None:
        self.standbys = count

    def wait(self, timeout: float | None) -> list[TaskExit]:
        return self._happenings.pop(0) if self._happenings else []

    def acknowledge(self, ended: TaskExit) -> None:
        self.acknowledged.append(ended)

    def beat(self) -> None:
        pass


class ScriptedInbox:
    """Gives `requests`, one batch for each call, and keeps the replies."""

    def __init__(self, *requests: list[JobRequest]) -> None:
        self._requests = list(requests)
        self.replies: list[tuple[str, Message]] = []

    def receive(self) -> list[JobRequest]:
        return self._requests.pop(0) if self._requests else []

    def reply(self, token: str, message: Message) -> None:
        self.replies.append((token, message))


@pytest.fixture
def inbox() -> ScriptedInbox:
    return ScriptedInbox()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    insitu = Insitu(tmp_path)
    insitu.script("")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    request = JobOptions("data/train", insitu.folder, ("train.py",), workers=2, max_restarts=0)
    return insitu.job(submit(insitu.paths, request))


def run(job: JobPaths, tasks: ScriptedTasks, inbox: ScriptedInbox) -> int:
    return Controller(job, tasks, inbox).run()


def elastic(job: JobPaths, task: TaskId, *, generation: int, step: int) -> None:
    """The task says that it trains and can continue without a peer."""
    writer = ProgressWriter(job.progress(task))
    writer.elastic, writer.generation = True, generation
    writer.write(0, step, 0, "exchange")
    writer.close()


def events(job: JobPaths) -> list[str]:
    return [entry.event["event"] for entry in Journal(job.journal).entries()]


def test_ends_become_a_journal_and_are_acknowledged(job: JobPaths, inbox: ScriptedInbox) -> None:
    tasks = ScriptedTasks(job, [TaskExit(W0, 1, 0)], [TaskExit(W1, 1, 0)])
    assert run(job, tasks, inbox) == 0
    assert tasks.launched == [W0, W1]
    assert tasks.acknowledged == [TaskExit(W0, 1, 0), TaskExit(W1, 1, 0)]
    assert job.output.read_bytes() == b"[insitu] job finished\n"
    assert Journal(job.journal).state().phase == "finished"
    roster = read_roster(job.roster)
    assert roster is not None and roster.generation == 1
    assert [(m.task, m.incarnation, m.shards) for m in roster.members] == [(W0, 1, (0,)), (W1, 1, (1,))]


def test_tasks_that_cannot_be_launched_take_the_others_with_them(job: JobPaths, inbox: ScriptedInbox) -> None:
    tasks = ScriptedTasks(job)
    tasks.refuses = {W1}
    assert run(job, tasks, inbox) == 1
    assert tasks.signals == [(W0, "term")]
    assert "worker:1 could not be started: no room for worker:1" in Journal(job.journal).state().reason


class Dying(ScriptedTasks):
    """Worker 1 is killed once both train; its replacement trains and both end well."""

    def __init__(self, job: JobPaths) -> None:
        super().__init__(job)
        self._waits = 0

    def wait(self, timeout: float | None) -> list[TaskExit]:
        self._waits += 1
        if self._waits == 1:
            elastic(self._job, W0, generation=1, step=3)
            elastic(self._job, W1, generation=1, step=3)
            return [TaskExit(W1, 1, -9)]
        if self._waits == 2:
            elastic(self._job, W0, generation=2, step=4)
            elastic(self._job, W1, generation=2, step=4)
            time.sleep(controller.FAST_POLL_INTERVAL)
            return []
        return [TaskExit(W0, 1, 0), TaskExit(W1, 2, 0)] if self._waits == 3 else []


class Stuck(ScriptedTasks):
    """Worker 0 ends, and worker 1 waits for what doesn't come, until it is told to end."""

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        return {task: ProcessState(False, 1, 2.5) for task in tasks}

    def wait(self, timeout: float | None) -> list[TaskExit]:
        if self._happenings:
            return self._happenings.pop(0)
        if (W1, "dump") in self.signals:
            return [TaskExit(W1, 1, -15)]
        time.sleep(0.01)
        return []


def test_a_worker_that_does_nothing_after_the_first_has_ended_is_stopped(
    job: JobPaths, inbox: ScriptedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "POLL_INTERVAL", 0.01)
    made = Controller(job, tasks := Stuck(job, [TaskExit(W0, 1, 0)]), inbox)
    made._quiet.timeout, made._stall_interval = 0.1, 0.02
    assert made.run() == 124
    assert tasks.signals == [(W1, "dump")]
    assert "worker:1 neither printed nor computed for 0.1 s" in Journal(job.journal).state().reason
    assert "LeftAlone" in events(job)


@pytest.fixture
def forgiving(job: JobPaths) -> JobPaths:
    """The job, with a restart allowed."""
    state = replace(Journal(job.journal).state(), max_restarts=1)
    Journal(job.journal).record(0.0, SubmittedEvent(), [], state)
    return job


def test_one_task_is_replaced_and_the_other_lives_on(forgiving: JobPaths, inbox: ScriptedInbox) -> None:
    tasks = Dying(forgiving)
    assert run(forgiving, tasks, inbox) == 0
    assert tasks.attempts == [(W0, 1), (W1, 1), (W1, 2)]
    roster = read_roster(forgiving.roster)
    assert roster is not None and roster.generation == 2
    assert [(m.task, m.incarnation) for m in roster.members] == [(W0, 1), (W1, 2)]
    (recovery,) = Journal(forgiving.journal).state().recoveries
    assert (recovery.how, recovery.tasks, recovery.steps) == ("replaced", (W1,), (0, 3))
    assert recovery.ended is not None and "training continues" in forgiving.output.read_text()


def test_a_new_controller_takes_over_what_runs(forgiving: JobPaths, inbox: ScriptedInbox) -> None:
    """The one before decided to replace worker 1, and died before it did anything about it."""
    first = ScriptedTasks(forgiving)
    made = Controller(forgiving, first, inbox)
    made._feed(SubmittedEvent())
    elastic(forgiving, W0, generation=1, step=3)
    elastic(forgiving, W1, generation=1, step=3)
    dead = TaskExitedEvent(W1, -9, None, (0, 3), (W0,), (W0,), (), 1)
    state, actions = advance(made._state, dead, 5.0)
    Journal(forgiving.journal).record(5.0, dead, actions, state)

    class Training(ScriptedTasks):
        def launch(self, task: TaskSpec, incarnation: int, command: Command) -> int:
            elastic(forgiving, task.task, generation=2, step=4)
            return super().launch(task, incarnation, command)

    second = Training(
        forgiving, [TaskExit(W1, 1, -9)], [TaskExit(W0, 1, 0), TaskExit(W1, 2, 0)], running={W0: 1}
    )
    assert run(forgiving, second, inbox) == 0
    assert second.attempts == [(W1, 2)]
    roster = read_roster(forgiving.roster)
    assert roster is not None and (roster.generation, roster.rank(W1, 2)) == (2, 1)
    assert TaskExit(W1, 1, -9) in second.acknowledged
    assert "taken over" in forgiving.output.read_text()


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


def test_what_was_begun_while_the_disk_was_full_is_not_begun_again(
    forgiving: JobPaths, inbox: ScriptedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before replaced worker 1, could not write that down, and died."""
    first = Controller(forgiving, ScriptedTasks(forgiving), inbox)
    first._feed(SubmittedEvent())
    monkeypatch.setattr(first._journal, "record", FullDisk(first._journal, float("inf")))
    for task in (W0, W1):
        elastic(forgiving, task, generation=1, step=3)
    dead = TaskExit(W1, 1, -9)
    first._handle_exit(dead)
    assert first._state.task(W1).incarnation == 2
    assert Journal(forgiving.journal).state().task(W1).incarnation == 1
    for task in (W0, W1):
        elastic(forgiving, task, generation=2, step=4)
    second = ScriptedTasks(
        forgiving, [dead], [], [TaskExit(W0, 1, 0), TaskExit(W1, 2, 0)], running={W0: 1, W1: 2}
    )
    assert run(forgiving, second, inbox) == 0
    assert second.launched == [] and dead in second.acknowledged
    roster = read_roster(forgiving.roster)
    assert roster is not None and (roster.generation, roster.rank(W1, 2)) == (2, 1)
    assert read_progress(forgiving.progress(W1)) is not None


def test_a_full_disk_does_not_end_a_job(
    job: JobPaths, inbox: ScriptedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_INTERVAL", 0.001)
    made = Controller(job, ScriptedTasks(job, [TaskExit(W0, 1, 0)], [TaskExit(W1, 1, 0)]), inbox)
    full = FullDisk(made._journal, 7)
    monkeypatch.setattr(made._journal, "record", full)
    assert made.run() == 0
    assert full.refused == 7
    assert events(job) == ["Created", "Submitted", "Launched", "TaskExited", "TaskExited"]
    assert Journal(job.journal).state().phase == "finished"


def test_a_disk_that_stays_full_is_an_error_in_the_end(
    job: JobPaths, inbox: ScriptedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_INTERVAL", 0.001)
    monkeypatch.setattr(controller, "JOURNAL_TIMEOUT", 0.01)
    made = Controller(job, ScriptedTasks(job, [TaskExit(W0, 1, 0)], [TaskExit(W1, 1, 0)]), inbox)
    monkeypatch.setattr(made._journal, "record", FullDisk(made._journal, float("inf")))
    with pytest.raises(ClusterError, match="disk is full"):
        made.run()


def test_a_journal_that_may_not_grow_is_not_waited_for(
    job: JobPaths, inbox: ScriptedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Controller(job, ScriptedTasks(job, [TaskExit(W0, 1, 0)], [TaskExit(W1, 1, 0)]), inbox)
    monkeypatch.setattr(made._journal, "record", FullDisk(made._journal, float("inf")))
    monkeypatch.setattr(journal, "read_file_size_limit", lambda: job.journal.stat().st_size)
    monkeypatch.setattr(made._tasks, "beat", lambda: pytest.fail("it waits"), raising=False)
    with pytest.raises(ClusterError, match="disk is full"):
        made.run()


STOP, SCALE = JobRequest("stop", "a1"), JobRequest("scale", "b2", 1)


def test_a_request_sent_again_is_the_same_and_gets_the_same_reply(job: JobPaths) -> None:
    inbox = ScriptedInbox([STOP], [STOP])
    tasks = ScriptedTasks(job)
    assert run(job, tasks, inbox) == 143
    assert tasks.signals == [(W0, "term"), (W1, "term")]
    assert inbox.replies == [("a1", {"ok": True, "text": "stopping every task"})] * 2
    assert events(job).count("StopRequested") == 1


class Deaf(ScriptedTasks):
    """Tasks that only SIGKILL ends."""

    def signal(self, task: TaskId, name: SignalName) -> None:
        self.signals.append((task, name))
        if name == "kill":
            self._happenings.append([TaskExit(task, 1, -9)])


def test_another_stop_kills_at_once(job: JobPaths) -> None:
    tasks = Deaf(job)
    assert run(job, tasks, ScriptedInbox([STOP], [JobRequest("stop", "c3")])) == 143
    assert tasks.signals == [(t, name) for name in ("term", "kill") for t in (W0, W1)]


def test_a_stop_without_anybody_who_awaits_a_reply_stops(job: JobPaths) -> None:
    inbox = ScriptedInbox([JobRequest("stop")])
    assert run(job, ScriptedTasks(job), inbox) == 143
    assert inbox.replies == []


def test_the_next_controller_gives_the_reply_that_the_dead_one_could_not(job: JobPaths) -> None:
    first = Controller(job, Deaf(job), ScriptedInbox([STOP]))
    first._feed(SubmittedEvent())
    first._feed(first._event_of(STOP))
    inbox = ScriptedInbox([STOP])
    tasks = Deaf(job, [], [], [TaskExit(W0, 1, -15), TaskExit(W1, 1, -15)], running={W0: 1, W1: 1})
    assert run(job, tasks, inbox) == 143
    assert inbox.replies == [("a1", {"ok": True, "text": "stopping every task"})]
    assert "kill" not in [name for _, name in tasks.signals]
    assert events(job).count("StopRequested") == 1


def test_a_request_that_is_refused_says_why(job: JobPaths) -> None:
    inbox = ScriptedInbox([SCALE])
    assert run(job, ScriptedTasks(job, [], [TaskExit(W0, 1, 0), TaskExit(W1, 1, 0)]), inbox) == 0
    ((token, reply),) = inbox.replies
    assert token == "b2" and reply["error"] == "refused" and "can't take part" in reply["text"]
    assert f"[insitu] {reply['text']}\n" in job.output.read_text()


def test_a_decision_is_in_the_journal_before_it_is_replied(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_INTERVAL", 0.001)
    inbox = ScriptedInbox([SCALE])
    made = Controller(job, ScriptedTasks(job, [], [TaskExit(W0, 1, 0), TaskExit(W1, 1, 0)]), inbox)
    full = FullDisk(made._journal, 7)
    monkeypatch.setattr(made._journal, "record", full)
    replied_after: list[int] = []
    monkeypatch.setattr(inbox, "reply", lambda token, message: replied_after.append(full.refused))
    assert made.run() == 0
    assert replied_after == [7]


def test_a_stop_is_replied_though_the_disk_is_full_and_ends_the_wait_for_it(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_INTERVAL", 0.001)
    inbox = ScriptedInbox([STOP], [], [], [], [JobRequest("stop", "c3")])
    made = Controller(job, ScriptedTasks(job), inbox)
    monkeypatch.setattr(made._journal, "record", FullDisk(made._journal, float("inf")))
    with pytest.raises(ClusterError, match="disk is full"):
        made.run()
    assert inbox.replies == [
        ("a1", {"ok": True, "text": "stopping every task"}),
        ("c3", {"error": "ended", "text": "stopped"}),
    ]
