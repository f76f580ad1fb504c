"""The shell around a job's decisions: feeds events, performs actions.

It is a child of the job's supervisor (see `supervisor.py`), which holds the tasks. So it may die:
every event is in the journal before it is acted upon, and the next controller reads there what was decided,
asks the supervisor what runs, and does what is missing. SIGTERM stops the job; SIGUSR1 says that there is a
wish to be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from insitu.cluster.control.channel import Channel
from insitu.cluster.control.supervised_tasks import LifeEnded, SupervisedTasks, SupervisorGone, Tasks
from insitu.cluster.decide import (
    ENDED,
    Action,
    Event,
    Finish,
    JobState,
    Launch,
    Launched,
    LaunchFailed,
    PeersParted,
    Publish,
    Ready,
    Recovered,
    Resumed,
    Say,
    ScaleRequested,
    Signal,
    Stalled,
    StallWatch,
    StopRequested,
    Submitted,
    TakenOver,
    TaskExited,
    TaskState,
    Tick,
    advance,
    contiguous,
    furthest,
    has_recovered,
    parted,
    ready_to_join,
    task_environment,
)
from insitu.cluster.engines import Command
from insitu.cluster.job_files import Journal, Merged, read_placement, read_spec, write_holder
from insitu.cluster.task import read_failure
from insitu.errors import ClusterError
from insitu.paths import JobPaths
from insitu.processes import die_with_parent, is_stopped, memory_available, memory_of
from insitu.progress import IDLE, Progress, read_progress
from insitu.roster import RECOVERING, Member, Roster, read_roster, write_roster
from insitu.spec import NodeId, TaskId

RETRY_PAUSE = 1.0
"""Seconds between two tries to write to a journal that refused it."""
PATIENCE = 600.0
"""Seconds for which a job that is over waits for its journal, unless it is asked to stop."""
CLOSE_LOOK = 0.02
"""Seconds between two looks at the tasks' progress while they recover or newcomers are awaited."""
LOOK = 0.25
PARTED_GRACE = 1.0
"""Seconds within which the death of a task explains why others say that they have lost a peer."""


class Controller:
    """Runs one job to its end. `wake` is the descriptor that signals make readable.

    A full disk doesn't end a job: what can't be written to the journal is tried again until it can, at the
    job's end for `PATIENCE` seconds.
    """

    def __init__(self, job: JobPaths, tasks: Tasks, wake: int) -> None:
        self._job = job
        self._home = job.root.parent.parent
        self._tasks = tasks
        self._wake = wake
        self._spec = read_spec(job)
        self._placement, self._cache = read_placement(job)
        self._journal = Journal(job.journal)
        self._state: JobState = self._journal.state()
        self._merged = Merged(job)
        self._roster = read_roster(job.roster) or Roster(0, ())
        self._reserved: dict[tuple[TaskId, int], str] = {}
        self._watch = StallWatch(self._spec.stall_timeout)
        self._stall_every = min(5.0, max(0.1, self._spec.stall_timeout / 10))
        self._started, self._started_monotonic = time.time(), time.monotonic()
        self._last_look = self._last_stall_look = self._now()
        self._parted_since: float | None = None
        self._standby_for = -1
        self._unpublished = False
        self._events: deque[Event] = deque()
        self._unwritten: deque[tuple[float, Event, list[Action], JobState]] = deque()
        self._unacknowledged: list[LifeEnded] = []
        self._begun: dict[tuple[TaskId, int], int] = {}
        """Process ids of lives that the controller before began; 0 where they have ended."""

    def _now(self) -> float:
        """Seconds since 1970, but never going back."""
        return self._started + time.monotonic() - self._started_monotonic

    def run(self, *, resume: bool = False) -> int:
        """Returns the job's exit code."""
        if resume:
            self._feed(Resumed())
        elif self._state.phase != "pending":
            self._take_over()
        self._feed(Submitted())
        while self._state.phase not in ENDED:
            for ended in self._tasks.wait(self._timeout()):
                self._ended(ended)
            self._hear_signals()
            self._look()
            if self._state.due is not None and self._now() >= self._state.due:
                self._feed(Tick())
            self._write_down()
        self._write_the_rest()
        return self._state.exit_code or 0

    def _timeout(self) -> float | None:
        times = [] if self._state.due is None else [self._state.due]
        if self._state.alive:
            times.append(self._last_look + self._look_every())
        if self._unwritten or self._unpublished:
            times.append(self._now() + RETRY_PAUSE)
        return max(0.0, min(times) - self._now()) if times else None

    # What the journal has

    def _write_down(self) -> None:
        """Writes what the journal lacks, in order, as far as it goes; then a roster that is due."""
        if self._unpublished:
            self._publish(self._state.generation)
        with contextlib.suppress(ClusterError):
            while self._unwritten:
                self._journal.record(*self._unwritten[0])
                self._unwritten.popleft()
            for ended in self._unacknowledged:
                self._tasks.acknowledge(ended)
            self._unacknowledged.clear()

    def _write_the_rest(self) -> None:
        """Raises ClusterError where the job's end can't be written down."""
        deadline = time.monotonic() + PATIENCE
        while self._unwritten and time.monotonic() < deadline and not self._signals():
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

    def _take_over(self) -> None:
        """Another controller has begun this job: does what it decided and didn't come to do."""
        self._feed(TakenOver())
        living = self._tasks.living()
        if self._roster.generation < self._state.generation:
            self._publish(self._state.generation)
        for task in self._state.alive:
            if task.task in living and task.asked:
                self._tasks.signal(task.task, task.asked)
        ends = self._tasks.wait(0.0)
        self._begun = {(t, attempt): pid for t, (attempt, pid) in living.items()}
        self._begun |= {(e.task, e.attempt): 0 for e in ends}
        unbegun = [t for t in self._state.alive if (t.task, t.attempt) not in self._begun]
        for ended in ends:
            self._ended(ended)
        missing = [t.task for t in unbegun if self._state.task(t.task) == t]
        if missing:
            self._launch(missing)
        self._hear_wish()

    # Doing what was decided

    def _perform(self, action: Action) -> None:
        match action:
            case Publish():
                self._publish(action.generation)
            case Launch():
                self._launch(action.tasks)
            case Signal():
                self._tasks.signal(action.task, action.name)
            case Say():
                self._merged.say(action.text)
            case Finish():
                pass

    def _publish(self, generation: int) -> None:
        """Writes the roster that follows from the state. A life keeps its address; a new one gets its own,
        except for that of one server alone."""
        named = [t for t in self._state.tasks if (t.member and not t.released) or t.task.role != "worker"]
        before = (*self._roster.members, *self._roster.others)
        addresses = {(m.task, m.attempt): m.address for m in before} | self._reserved
        # Workers and the other servers look for a server that comes back where it was.
        lived = {m.task: m.address for m in before if m.task.role == "ps"}
        back = [t for t in named if t.replacement and t.task in lived]
        addresses = {(t.task, t.attempt): lived[t.task] for t in back} | addresses
        try:
            self._reserve([t for t in named if (t.task, t.attempt) not in addresses])
            addresses |= self._reserved
            members = [Member(t.task, t.attempt, addresses[t.task, t.attempt], t.shards) for t in named]
            workers = tuple(m for m in members if m.task.role == "worker")
            others = tuple(m for m in members if m.task.role != "worker")
            self._roster = Roster(generation, workers, others)
            self._reserved.clear()
            write_roster(self._job.roster, self._roster)
            self._unpublished = False
        except (ClusterError, OSError) as error:
            if not self._unpublished:
                self._merged.say(f"the roster of generation {generation} can't be written yet: {error}")
            self._unpublished = True

    def _reserve(self, tasks: Sequence[TaskState]) -> None:
        if tasks:
            found = self._tasks.reserve([t.task for t in tasks])
            self._reserved |= {(t.task, t.attempt): found[t.task] for t in tasks}

    def _launch(self, names: Sequence[TaskId]) -> None:
        self._watch.begin(names, self._stopped())
        tasks = {name: self._state.task(name) for name in names}
        # The controller before began these, and died while it could not write that down.
        launched = [(n, self._begun[n, t.attempt]) for n, t in tasks.items() if (n, t.attempt) in self._begun]
        names = [n for n, t in tasks.items() if (n, t.attempt) not in self._begun]
        try:
            for task in map(self._state.task, names):
                for trace in (self._job.progress, self._job.failure, self._job.reads):
                    trace(task.task).unlink(missing_ok=True)
            for task in map(self._state.task, names):
                pid = self._tasks.launch(
                    task.task, task.attempt, task.node or NodeId(""), self._command(task)
                )
                launched.append((task.task, pid))
        except (ClusterError, OSError) as error:
            missing = tuple(n for n in names if n not in dict(launched))
            self._events.append(LaunchFailed(missing, str(error), self._elastic(self._records())))
        if launched:
            self._events.append(Launched(tuple(launched)))

    def _command(self, task: TaskState) -> Command:
        self._job.task(task.task).mkdir(parents=True, exist_ok=True)
        address = ""
        if self._roster.rank(task.task) is None and task.task.role == "worker":
            self._reserve([task])
            address = self._reserved[task.task, task.attempt]
            if not task.shards:
                # What it will run is settled once it is ready; until then its data are those of its index.
                layout = contiguous(self._state.wanted, self._spec.shards)
                task = replace(task, shards=layout[task.task.index])
        environment = task_environment(self._spec, self._roster, task, address, self._home, os.environ)
        arguments = (sys.executable, "-P", "-m", "insitu.cluster.task.entry", *self._spec.command)
        return Command(arguments, environment, self._job.code)

    # Seeing what happens

    def _ended(self, ended: LifeEnded) -> None:
        self._unacknowledged.append(ended)
        records = self._records()
        living = {t.task for t in self._state.alive} - {ended.task}
        self._feed(
            TaskExited(
                ended.task,
                ended.code,
                read_failure(self._job.failure(ended.task)) if ended.code else None,
                furthest(records),
                tuple(sorted(t for t, r in records.items() if t in living and r and r.place != IDLE)),
                tuple(t for t in self._elastic(records) if t != ended.task),
                self._lost_nodes(),
                ended.attempt,
                tuple(sorted(t for t, r in records.items() if t in living and r and r.place == RECOVERING)),
            )
        )

    def _records(self) -> dict[TaskId, Progress | None]:
        return {t.task: read_progress(self._job.progress(t.task)) for t in self._state.tasks}

    def _elastic(self, records: dict[TaskId, Progress | None]) -> tuple[TaskId, ...]:
        living = {t.task for t in self._state.alive}
        return tuple(sorted(t for t, r in records.items() if t in living and r and r.elastic))

    def _lost_nodes(self) -> tuple[NodeId, ...]:
        """Nodes that owned partitions of the job's cache and have lost their store."""
        owners = {owner for partition in self._cache.partitions for owner in partition.owners}
        nodes = self._home / "nodes"
        return tuple(sorted(node for node in owners if nodes.exists() and not (nodes / node).exists()))

    def _look_every(self) -> float:
        awaited = any(not t.member and not t.released for t in self._state.alive)
        return CLOSE_LOOK if awaited or self._is_recovering() else min(LOOK, self._stall_every)

    def _is_recovering(self) -> bool:
        begun = self._state.attempts[-1].started if self._state.attempts else 0.0
        return any(r.ended is None and r.at >= begun for r in self._state.recoveries)

    def _look(self) -> None:
        """What the tasks say of themselves becomes events."""
        now = self._now()
        if not self._state.alive or now - self._last_look < self._look_every():
            return
        self._last_look = now
        records = self._records()
        if new := ready_to_join(self._state, records):
            self._feed(Ready(new, furthest(records)))
        if self._is_recovering() and has_recovered(self._state, records):
            self._feed(Recovered(self._state.generation))
        self._look_for_parting(records, now)
        if now - self._last_stall_look >= self._stall_every:
            self._last_stall_look = now
            self._look_for_stall(records, now)
            self._keep_standby(records)

    def _look_for_parting(self, records: dict[TaskId, Progress | None], now: float) -> None:
        apart = parted(self._state, records)
        if not apart:
            self._parted_since = None
        elif self._parted_since is None:
            self._parted_since = now
        elif now - self._parted_since >= PARTED_GRACE:
            self._parted_since = None
            self._feed(PeersParted(apart, furthest(records), self._elastic(records)))

    def _look_for_stall(self, records: dict[TaskId, Progress | None], now: float) -> None:
        living = {t.task for t in self._state.alive}
        stall = self._watch.observe(
            {t: record for t, record in records.items() if t in living},
            now,
            idle_too=self._state.goal == "finish",
            stopped=self._stopped,
        )
        if stall is not None:
            self._feed(Stalled(stall.text, furthest(records), stall.culprits, self._elastic(records)))

    def _stopped(self) -> set[TaskId]:
        """Tasks whose processes are suspended."""
        return {t.task for t in self._state.alive if t.pid and is_stopped(t.pid)}

    def _keep_standby(self, records: dict[TaskId, Progress | None]) -> None:
        """Asks for processes that stand by, once all members train and as often as one has been used."""
        members = self._state.members
        steady = self._state.phase == "running" and not self._is_recovering()
        used = sum(t.attempt for t in self._state.tasks)
        if not steady or self._standby_for == used or self._spec.standby == 0:
            return
        if self._state.on_loss == "restart" or not all(
            (r := records[t.task]) and r.elastic and r.step >= 0 for t in members
        ):
            return
        self._standby_for = used
        count = self._spec.standby
        if count is None:
            most = max((memory_of(t.pid) for t in members), default=0)
            count = int(memory_available() > 2 * most > 0)
        self._tasks.keep_standby(count, self._command(members[-1]))

    # Being told

    def _signals(self) -> bytes:
        """Numbers of the signals that have come since the last look."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._wake, 64)
        return b""

    def _hear_signals(self) -> None:
        numbers = self._signals()
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._feed(StopRequested())
        if signal.SIGUSR1 in numbers:
            self._hear_wish()

    def _hear_wish(self) -> None:
        try:
            wish = json.loads(self._job.wish.read_text())
            self._job.wish.unlink()
            workers, token = int(wish["workers"]), str(wish["token"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        records = self._records()
        self._feed(ScaleRequested(workers, token, furthest(records), self._elastic(records)))


def control(job: JobPaths, lock: int, channel: Channel, *, resume: bool) -> int:
    """The whole life of a controller, in a process that the supervisor forked. Returns its exit code."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    die_with_parent(signal.SIGKILL, os.getppid())
    write_holder(lock)
    try:
        tasks = SupervisedTasks(channel, wake)
        code = 1
        try:
            code = Controller(job, tasks, wake).run(resume=resume)
        except ClusterError as error:
            # What can't be done now can't be done by another controller either.
            sys.stderr.write(f"insitu: {error}\n")
            sys.stderr.flush()
        tasks.done(code)
    except SupervisorGone:
        return 1
    except Exception:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return code
