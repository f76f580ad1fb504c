"""The shell around a job's decisions: feeds events, performs actions. One detached process for each job.

`python -P -m insitu.cluster.controller JOB_FOLDER LOCK` becomes two processes. The *guard* is the parent:
it adopts whatever loses its parent, and when the controller ends, in whatever way, it kills all that is
left, so nothing of a job outlives its controller. The *controller*, its child, runs the job.
SIGTERM stops the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from insitu.cluster.engine import Command, Ended, Engine, Output
from insitu.cluster.environment import task_environment
from insitu.cluster.failure import read_failure
from insitu.cluster.job import advance
from insitu.cluster.job_state import (
    ENDED,
    Action,
    Event,
    Finish,
    JobState,
    Launch,
    LaunchFailed,
    Say,
    Signal,
    Stalled,
    Steps,
    StopRequested,
    Submitted,
    TaskExited,
    Tick,
)
from insitu.cluster.journal import Journal
from insitu.cluster.logs import JobLogs
from insitu.cluster.process import adopt_orphans, die_with_parent, end_all_children
from insitu.cluster.records import read_placement, read_spec
from insitu.cluster.settling import settle
from insitu.cluster.stall import StallWatch
from insitu.cluster.task import PARENT_ENV
from insitu.errors import ClusterError
from insitu.paths import JobPaths
from insitu.progress import IDLE, Progress, read_progress
from insitu.roster import Member, Roster, write_roster
from insitu.spec import Placement, TaskId

RETRY_PAUSE = 1.0
"""Seconds between two tries to write to a journal that refused it."""
PATIENCE = 600.0
"""Seconds for which a job that is over waits for its journal, unless it is asked to stop."""


class Controller:
    """Runs one job to its end. `wake` is the descriptor that signals make readable.

    A full disk doesn't end a job: what can't be written to the journal is tried again until it can, at the
    job's end for `PATIENCE` seconds.
    """

    def __init__(self, job: JobPaths, engine: Engine, wake: int) -> None:
        self._job = job
        self._home = job.root.parent.parent
        self._engine = engine
        self._wake = wake
        self._spec = read_spec(job)
        self._placement, _ = read_placement(job)
        self._journal = Journal(job.journal)
        self._state: JobState = self._journal.state()
        self._logs = JobLogs(job)
        self._watch = StallWatch(self._spec.stall_timeout)
        self._look_every = min(5.0, max(0.1, self._spec.stall_timeout / 10))
        self._started, self._started_monotonic = time.time(), time.monotonic()
        self._last_look = self._now()
        self._events: deque[Event] = deque()
        self._unwritten: deque[tuple[float, Event, list[Action], JobState]] = deque()

    def _now(self) -> float:
        """Seconds since 1970, but never going back."""
        return self._started + time.monotonic() - self._started_monotonic

    def run(self) -> int:
        """Returns the job's exit code."""
        self._feed(Submitted())
        while self._state.phase not in ENDED:
            for happened in self._engine.wait(self._timeout()):
                if isinstance(happened, Output):
                    self._logs.write(happened.task, happened.data, self._now())
                else:
                    self._ended(happened)
            if self._stop_was_asked():
                self._feed(StopRequested())
            self._look_for_stall()
            if self._state.due is not None and self._now() >= self._state.due:
                self._feed(Tick())
            self._write_down()
        self._write_the_rest()
        return self._state.exit_code or 0

    def _timeout(self) -> float | None:
        times = [] if self._state.due is None else [self._state.due]
        if self._state.alive:
            times.append(self._last_look + self._look_every)
        if self._unwritten:
            times.append(self._now() + RETRY_PAUSE)
        return min(times) - self._now() if times else None

    def _write_down(self) -> None:
        """Writes what the journal lacks, in order, as far as it goes."""
        with contextlib.suppress(ClusterError):
            while self._unwritten:
                self._journal.record(*self._unwritten[0])
                self._unwritten.popleft()

    def _write_the_rest(self) -> None:
        """Raises ClusterError where the job's end can't be written down."""
        deadline = time.monotonic() + PATIENCE
        while self._unwritten and time.monotonic() < deadline and not self._stop_was_asked():
            time.sleep(RETRY_PAUSE)
            self._write_down()
        if self._unwritten:
            self._journal.record(*self._unwritten[0])

    def _feed(self, event: Event) -> None:
        """Decides about `event`, writes the decision down, then acts; events that this causes follow."""
        self._events.append(event)
        while self._events:
            event = self._events.popleft()
            now = self._now()
            before = self._state
            self._state, actions = advance(before, event, now)
            if self._state != before or actions:
                self._unwritten.append((now, event, actions, self._state))
                self._write_down()
            for action in actions:
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Launch():
                self._launch(action.attempt)
            case Signal():
                self._engine.signal(action.task, action.name)
            case Say():
                self._logs.say(action.text)
            case Finish():
                pass

    def _launch(self, attempt: int) -> None:
        tasks = self._placement.tasks
        self._watch.reset()
        launched = 0
        try:
            addresses = self._engine.reserve(tasks)
            write_roster(self._job.roster, roster_of(self._placement, addresses, attempt))
            inherited = {**os.environ, PARENT_ENV: str(os.getpid())}
            for spec in tasks:
                self._job.progress(spec.task).unlink(missing_ok=True)
                self._job.failure(spec.task).unlink(missing_ok=True)
                self._job.reads(spec.task).unlink(missing_ok=True)
            for spec in tasks:
                self._logs.open(spec.task, attempt)
                environment = task_environment(
                    self._spec, self._placement, spec, addresses, attempt, self._home, inherited
                )
                arguments = (sys.executable, "-P", "-m", "insitu.cluster.task", *self._spec.command)
                self._engine.launch(spec, Command(arguments, environment, self._job.code))
                launched += 1
        except (ClusterError, OSError) as error:
            missing = tuple(spec.task for spec in tasks[launched:])
            self._events.append(LaunchFailed(missing, str(error)))

    def _ended(self, ended: Ended) -> None:
        self._logs.close(ended.task)
        records = self._records()
        living = {t.task for t in self._state.alive} - {ended.task}
        self._feed(
            TaskExited(
                ended.task,
                ended.code,
                read_failure(self._job.failure(ended.task)) if ended.code else None,
                furthest(records),
                tuple(sorted(t for t, r in records.items() if t in living and r and r.place != IDLE)),
            )
        )

    def _records(self) -> dict[TaskId, Progress | None]:
        return {t.task: read_progress(self._job.progress(t.task)) for t in self._state.tasks}

    def _look_for_stall(self) -> None:
        now = self._now()
        if not self._state.alive or now - self._last_look < self._look_every:
            return
        self._last_look = now
        records = self._records()
        living = {t.task for t in self._state.alive}
        stall = self._watch.observe(
            {t: record for t, record in records.items() if t in living},
            now,
            idle_too=self._state.goal == "finish",
        )
        if stall is not None:
            self._feed(Stalled(stall, furthest(records)))

    def _stop_was_asked(self) -> bool:
        """Empties the descriptor; True where a signal had been written to it."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._wake, 64))
        return False

    def close(self) -> None:
        self._engine.close()
        self._logs.finish()


def roster_of(placement: Placement, addresses: Mapping[TaskId, str], attempt: int) -> Roster:
    """The roster of an attempt of all tasks, whose generation is its number."""
    members = [Member(t.task, attempt, addresses[t.task], t.shards) for t in placement.tasks]
    workers = tuple(m for m in members if m.task.role == "worker")
    return Roster(attempt, workers, tuple(m for m in members if m.task.role != "worker"))


def furthest(records: dict[TaskId, Progress | None]) -> Steps | None:
    """The furthest (epoch, step) that any task has reported, or None."""
    return max(((r.epoch, r.step) for r in records.values() if r is not None), default=None)


def _control(job: JobPaths, lock: int, guard: int) -> int:
    from insitu.cluster.local import LocalEngine
    from insitu.cluster.lock import write_holder

    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM, guard)
    write_holder(lock)
    controller = Controller(job, LocalEngine(wake), wake)
    try:
        code = controller.run()
    finally:
        controller.close()
    return code


def _guard(job: JobPaths, controller: int) -> int:
    """Reaps orphans until the controller has ended, then ends whatever is left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == controller:
            break
    end_all_children()
    settle(job)
    return os.waitstatus_to_exitcode(status)


def main(arguments: list[str]) -> int:
    job, lock = JobPaths(Path(arguments[0])), int(arguments[1])
    os.set_inheritable(lock, False)
    adopt_orphans()
    guard = os.getpid()
    controller = os.fork()
    if controller:
        return _guard(job, controller)
    return _control(job, lock, guard)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
