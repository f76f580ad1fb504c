"""Runs one job: records what happens as events, has `advance` decide, and performs the decided actions.

It is a child of the job's supervisor (see `supervisor.py`), which holds the tasks. So it may die:
every event is in the journal before it is acted upon, and the next controller reads there what was decided,
asks the supervisor what runs, and does what is missing. Requests of users come through `request_inbox.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.process.processes import die_with_parent
from insitu.base.progress import RESTING, Progress
from insitu.base.roster import CONNECTING, RECOVERING, Member, Roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.control.request_inbox import Inbox, JobRequest, ReplyBook, RequestInbox, send_signal
from insitu.cluster.control.supervised_tasks import (
    SupervisedTasks,
    SupervisorLost,
    TaskExit,
    Tasks,
    has_room_for_standby,
)
from insitu.cluster.control.task_mover import TaskMover
from insitu.cluster.decide import (
    ENDED,
    Action,
    Event,
    Finish,
    IdleWatch,
    JobState,
    Launch,
    LaunchedEvent,
    LaunchFailedEvent,
    LeftAloneEvent,
    Log,
    PeersLostEvent,
    Publish,
    ReadyEvent,
    RecoveredEvent,
    Reply,
    ScaleRequestedEvent,
    Signal,
    StalledEvent,
    StallWatch,
    StopRequestedEvent,
    SubmittedEvent,
    TakenOverEvent,
    TaskExitedEvent,
    TaskState,
    TickEvent,
    advance,
    assign_contiguous_shards,
    build_task_environment,
    find_disconnected,
    find_furthest,
    find_left_alone,
    find_ready_to_join,
    find_waiting_for_ended,
    has_recovered,
)
from insitu.cluster.engines import Channel, Command, Wakeup
from insitu.cluster.job_files import (
    Journal,
    MergedLog,
    has_checkpoint,
    read_placement,
    read_spec,
    write_controller_pid,
)

RETRY_INTERVAL = 1.0
"""Seconds between two tries to write to a journal that refused it."""
JOURNAL_TIMEOUT = 600.0
"""Seconds for which a job that is over waits for its journal, unless it is asked to stop."""
FAST_POLL_INTERVAL = 0.02
"""Seconds between two looks at the tasks' progress while they recover or newcomers are awaited."""
POLL_INTERVAL = 0.25
LOST_PEERS_GRACE = 1.0
"""Seconds within which the death of a task explains why others say that they have lost a peer."""

_WAITING = (RECOVERING, CONNECTING)
"""Places of tasks that wait for others."""


class Controller:
    """Runs one job to its end.

    It knows its tasks and nodes through `tasks`: they may be on other machines. Its own files are the job's
    journal, specification and placement, and the merged output.

    A full disk doesn't end a job: what can't be written to the journal is tried again until it can, at the
    job's end for `JOURNAL_TIMEOUT` seconds.
    """

    def __init__(self, job: JobPaths, tasks: Tasks, inbox: Inbox) -> None:
        self._job = job
        self._home = job.root.parent.parent
        self._tasks = tasks
        self._inbox = inbox
        self._spec = read_spec(job)
        self._placement, self._cache = read_placement(job)
        self._journal = Journal(job.journal)
        self._state: JobState = self._journal.state()
        self._merged = MergedLog(job)
        self._roster = tasks.published_roster() or Roster(0, ())
        self._reserved: dict[tuple[TaskId, int], str] = {}
        self._mover = TaskMover(job, self._spec, self._placement, self._cache, tasks)
        self._watch = StallWatch(self._spec.stall_timeout)
        self._quiet = IdleWatch(self._spec.stall_timeout)
        self._stall_interval = min(5.0, max(0.1, self._spec.stall_timeout / 10))
        self._started, self._started_monotonic = time.time(), time.monotonic()
        self._last_poll = self._last_stall_check = self._now()
        self._peers_lost_since: float | None = None
        self._standby_for = -1
        self._unpublished = False
        self._events: deque[Event] = deque()
        self._unwritten: deque[tuple[float, Event, list[Action], JobState]] = deque()
        self._unacknowledged: list[TaskExit] = []
        self._replies = ReplyBook(inbox, self._journal)
        self._launched_before: dict[tuple[TaskId, int], int] = {}
        """Process ids of incarnations that the previous controller launched; 0 if they have ended."""

    def _now(self) -> float:
        """Return the time in seconds since 1970, but never going back."""
        return self._started + time.monotonic() - self._started_monotonic

    def run(self) -> int:
        """Return the job's exit code."""
        if self._state.phase != "pending":
            self._take_over()
        elif self._state.attempts:
            self._feed(SubmittedEvent(self._find_lost_nodes(), has_checkpoint(self._job)))
        else:
            self._feed(SubmittedEvent())
        while self._state.phase not in ENDED:
            for ended in self._tasks.wait(self._compute_timeout()):
                self._handle_exit(ended)
            self._handle_requests()
            self._poll_tasks()
            if self._state.due is not None and self._now() >= self._state.due:
                self._feed(TickEvent())
            self._write_journal()
        self._drain_journal()
        self._replies.send(is_journal_written=True)
        return self._state.exit_code or 0

    def _compute_timeout(self) -> float | None:
        times = [] if self._state.due is None else [self._state.due]
        if self._state.alive:
            times.append(self._last_poll + self._poll_interval())
        if self._unwritten or self._unpublished:
            times.append(self._now() + RETRY_INTERVAL)
        return max(0.0, min(times) - self._now()) if times else None

    # Journal

    def _write_journal(self) -> None:
        """Write what the journal lacks, in order, as far as it goes; then a roster that is due."""
        if self._unpublished:
            self._publish(self._state.generation)
        with contextlib.suppress(ClusterError):
            while self._unwritten:
                self._journal.record(*self._unwritten[0])
                self._unwritten.popleft()
            for ended in self._unacknowledged:
                self._tasks.acknowledge(ended)
            self._unacknowledged.clear()
        self._replies.send(is_journal_written=not self._unwritten)

    def _drain_journal(self) -> None:
        """Raise ClusterError if the job's end can't be written down."""
        deadline = time.monotonic() + (0.0 if self._journal.is_at_limit() else JOURNAL_TIMEOUT)
        while self._unwritten and time.monotonic() < deadline and not self._handle_requests():
            time.sleep(RETRY_INTERVAL)
            self._tasks.beat()
            self._write_journal()
        if self._unwritten:
            self._journal.record(*self._unwritten[0])

    def _feed(self, event: Event) -> None:
        """Decide about `event`, write the decision down, then act; events that this causes follow."""
        self._events.append(event)
        while self._events:
            event = self._events.popleft()
            now = self._now()
            before = self._state
            self._state, actions = advance(before, event, now)
            if self._state != before or actions:
                self._unwritten.append((now, event, actions, self._state))
                self._write_journal()
            for action in actions:
                self._perform(action)

    def _take_over(self) -> None:
        """Another controller has begun this job: does what it decided and didn't come to do."""
        self._feed(TakenOverEvent())
        running = self._tasks.running()
        if self._roster.generation < self._state.generation:
            self._publish(self._state.generation)
        for task in self._state.alive:
            if task.task in running and task.signal_sent:
                self._tasks.signal(task.task, task.signal_sent)
        exits = self._tasks.wait(0.0)
        self._launched_before = {(t, incarnation): pid for t, (incarnation, pid) in running.items()}
        self._launched_before |= {(e.task, e.incarnation): 0 for e in exits}
        unlaunched = [t for t in self._state.alive if (t.task, t.incarnation) not in self._launched_before]
        for ended in exits:
            self._handle_exit(ended)
        missing = [t.task for t in unlaunched if self._state.task(t.task) == t]
        if missing:
            self._launch(missing)

    # Performing actions

    def _perform(self, action: Action) -> None:
        match action:
            case Publish():
                self._publish(action.generation)
            case Launch():
                self._launch(action.tasks)
            case Signal():
                self._tasks.signal(action.task, action.name)
            case Log():
                self._merged.log(action.text)
            case Reply():
                self._replies.note(action)
            case Finish():
                pass

    def _publish(self, generation: int) -> None:
        """Write the roster that follows from the state.

        A running task keeps its address; a new incarnation gets its own, except for that of a single server.
        """
        named = [t for t in self._state.tasks if (t.member and not t.released) or t.task.role != "worker"]
        before = (*self._roster.members, *self._roster.others)
        addresses = {(m.task, m.incarnation): m.address for m in before} | self._reserved
        # Workers and the other servers look for a returning server at its earlier address.
        lived = {m.task: m.address for m in before if m.task.role == "ps"}
        back = [t for t in named if t.replacement and t.task in lived]
        addresses = {(t.task, t.incarnation): lived[t.task] for t in back} | addresses
        try:
            self._reserve([t for t in named if (t.task, t.incarnation) not in addresses])
            addresses |= self._reserved
            members = [
                Member(t.task, t.incarnation, addresses[t.task, t.incarnation], t.shards) for t in named
            ]
            workers = tuple(m for m in members if m.task.role == "worker")
            others = tuple(m for m in members if m.task.role != "worker")
            over = self._state.goal == "finish"
            self._roster = Roster(generation, workers, others, self._state.ended_before_others, over)
            self._reserved.clear()
            self._tasks.publish_roster(self._roster)
            self._unpublished = False
        except ClusterError as error:
            if not self._unpublished:
                self._merged.log(f"the roster of generation {generation} can't be written yet: {error}")
            self._unpublished = True

    def _reserve(self, tasks: Sequence[TaskState]) -> None:
        if tasks:
            found = self._tasks.reserve([_task_spec(t) for t in tasks])
            self._reserved |= {(t.task, t.incarnation): found[t.task] for t in tasks}

    def _launch(self, names: Sequence[TaskId]) -> None:
        self._watch.begin(names, self._find_suspended())
        tasks = {name: self._state.task(name) for name in names}
        # The controller before began these, and died while it could not write that down.
        launched = [
            (n, self._launched_before[n, t.incarnation])
            for n, t in tasks.items()
            if (n, t.incarnation) in self._launched_before
        ]
        names = [n for n, t in tasks.items() if (n, t.incarnation) not in self._launched_before]
        try:
            self._tasks.clear_records(names)
            for task in map(self._state.task, names):
                pid = self._tasks.launch(_task_spec(task), task.incarnation, self._build_command(task))
                launched.append((task.task, pid))
        except ClusterError as error:
            missing = tuple(n for n in names if n not in dict(launched))
            elastic = self._find_elastic(self._read_records())
            self._events.append(LaunchFailedEvent(missing, str(error), elastic, self._find_lost_nodes()))
        if launched:
            incarnations = tuple(tasks[name].incarnation for name, _ in launched)
            self._events.append(LaunchedEvent(tuple(launched), incarnations))

    def _build_command(self, task: TaskState) -> Command:
        address = ""
        if self._roster.rank(task.task) is None and task.task.role == "worker":
            self._reserve([task])
            address = self._reserved[task.task, task.incarnation]
            if not task.shards:
                # It gets its shards once it is ready. Until then it has those of a worker with its index.
                layout = assign_contiguous_shards(self._state.target_workers, self._spec.shards)
                task = replace(task, shards=layout[task.task.index])
        environment = build_task_environment(self._spec, self._roster, task, address, self._home, os.environ)
        arguments = (sys.executable, "-P", "-m", "insitu.cluster.task.entry", *self._spec.command)
        return Command(arguments, environment)

    # Observing tasks

    def _handle_exit(self, ended: TaskExit) -> None:
        self._unacknowledged.append(ended)
        records = self._read_records()
        running = {t.task for t in self._state.alive} - {ended.task}
        self._feed(
            TaskExitedEvent(
                ended.task,
                ended.code,
                self._tasks.read_failure(ended.task) if ended.code else None,
                find_furthest(records),
                tuple(sorted(t for t, r in records.items() if t in running and r and r.place not in RESTING)),
                tuple(t for t in self._find_elastic(records) if t != ended.task),
                self._find_lost_nodes(),
                ended.incarnation,
                tuple(sorted(t for t, r in records.items() if t in running and r and r.place in _WAITING)),
            )
        )

    def _read_records(self) -> dict[TaskId, Progress | None]:
        found = self._tasks.read_progress([t.task for t in self._state.tasks])
        return {t.task: found.get(t.task) for t in self._state.tasks}

    def _find_elastic(self, records: dict[TaskId, Progress | None]) -> tuple[TaskId, ...]:
        running = {t.task for t in self._state.alive}
        return tuple(sorted(t for t, r in records.items() if t in running and r and r.elastic))

    def _find_lost_nodes(self) -> tuple[NodeId, ...]:
        """Return the nodes of tasks and of the cache's partitions that have lost their store, or can't be
        reached."""
        owners = {owner for partition in self._cache.partitions for owner in partition.owners}
        owners |= {task.node for task in self._state.tasks if task.node}
        states = self._tasks.node_states(sorted(owners))
        return tuple(sorted(node for node, state in states.items() if not state.has_store))

    def _poll_interval(self) -> float:
        awaited = any(not t.member and not t.released for t in self._state.alive)
        return (
            FAST_POLL_INTERVAL
            if awaited or self._is_recovering()
            else min(POLL_INTERVAL, self._stall_interval)
        )

    def _is_recovering(self) -> bool:
        begun = self._state.attempts[-1].started if self._state.attempts else 0.0
        return any(r.ended is None and r.at >= begun for r in self._state.recoveries)

    def _poll_tasks(self) -> None:
        """Read what the tasks report, and feed the events that follow."""
        now = self._now()
        if not self._state.alive or now - self._last_poll < self._poll_interval():
            return
        self._last_poll = now
        records = self._read_records()
        if new := find_ready_to_join(self._state, records):
            self._feed(ReadyEvent(new, find_furthest(records)))
        if self._is_recovering() and has_recovered(self._state, records):
            self._feed(RecoveredEvent(self._state.generation))
        self._check_lost_peers(records, now)
        elastic = self._find_elastic(records)
        if not self._is_recovering() and (
            event := self._mover.advance(self._state, elastic, find_furthest(records), now)
        ):
            self._feed(event)
        if now - self._last_stall_check >= self._stall_interval:
            self._last_stall_check = now
            self._check_stall(records, now)
            self._check_left_alone(records, now)
            self._keep_standby(records)

    def _check_lost_peers(self, records: dict[TaskId, Progress | None], now: float) -> None:
        if waiting := find_waiting_for_ended(self._state, records):
            self._feed(PeersLostEvent(waiting, find_furthest(records), self._find_elastic(records)))
            return
        disconnected = find_disconnected(self._state, records)
        if not disconnected:
            self._peers_lost_since = None
        elif self._peers_lost_since is None:
            self._peers_lost_since = now
        elif now - self._peers_lost_since >= LOST_PEERS_GRACE:
            self._peers_lost_since = None
            self._feed(PeersLostEvent(disconnected, find_furthest(records), self._find_elastic(records)))

    def _check_stall(self, records: dict[TaskId, Progress | None], now: float) -> None:
        running = {t.task for t in self._state.alive}
        stall = self._watch.observe(
            {t: record for t, record in records.items() if t in running},
            now,
            idle_too=self._state.goal == "finish",
            stopped=self._find_suspended,
        )
        if stall is not None:
            self._feed(
                StalledEvent(stall.text, find_furthest(records), stall.culprits, self._find_elastic(records))
            )

    def _check_left_alone(self, records: dict[TaskId, Progress | None], now: float) -> None:
        """Notice workers that do nothing once the first has ended."""
        left = find_left_alone(self._state, records)
        states = self._tasks.process_states(left) if left else {}
        quiet = self._quiet.observe(
            {task: state.cpu_seconds for task, state in states.items() if not state.suspended},
            self._merged.size(),
            now,
        )
        if quiet:
            self._feed(LeftAloneEvent(quiet, self._quiet.timeout, find_furthest(records)))

    def _find_suspended(self) -> set[TaskId]:
        """Return the tasks whose processes are suspended."""
        states = self._tasks.process_states([t.task for t in self._state.alive])
        return {task for task, state in states.items() if state.suspended}

    def _keep_standby(self, records: dict[TaskId, Progress | None]) -> None:
        """Ask for processes that stand by, once all members train and as often as one has been used."""
        members = self._state.members
        steady = self._state.phase == "running" and not self._is_recovering()
        used = sum(t.incarnation for t in self._state.tasks)
        if not steady or self._standby_for == used or self._spec.standby == 0 or self._spec.gpus_per_worker:
            return
        if self._state.on_loss == "restart" or not all(
            (r := records[t.task]) and r.elastic and r.step >= 0 for t in members
        ):
            return
        self._standby_for = used
        count = self._spec.standby
        if count is None:
            count = int(has_room_for_standby(self._tasks, [t.task for t in members], members[-1].node))
        self._tasks.keep_standby(count, self._build_command(members[-1]))

    # Requests of users

    def _handle_requests(self) -> bool:
        """Handle the requests that have come. Returns True if one of them was to stop."""
        requests = self._inbox.receive()
        for request in requests:
            self._handle_request(request)
        return any(request.action == "stop" for request in requests)

    def _handle_request(self, request: JobRequest) -> None:
        """Decide about `request`, unless that was done before and it has been sent again."""
        if request.action == "signal":
            send_signal(request, self._tasks, self._inbox)
            return
        if self._replies.find(request.token) is None:
            self._feed(self._event_of(request))
        self._replies.queue(request, self._state.phase)
        self._replies.send(is_journal_written=not self._unwritten)

    def _event_of(self, request: JobRequest) -> Event:
        if request.action == "stop":
            return StopRequestedEvent(request.token)
        records = self._read_records()
        return ScaleRequestedEvent(
            request.workers, request.token, find_furthest(records), self._find_elastic(records)
        )


def _task_spec(task: TaskState) -> TaskSpec:
    return TaskSpec(task.task, task.node or NodeId(""), task.shards)


def control(job: JobPaths, lock: int, channel: Channel, listener: socket.socket) -> int:
    """Run a controller in a process that the supervisor forked. Returns its exit code."""
    wakeup = Wakeup(signal.SIGTERM, signal.SIGINT)
    inbox = RequestInbox(listener, wakeup)
    for number in (signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    die_with_parent(signal.SIGKILL, os.getppid())
    write_controller_pid(lock)
    try:
        tasks = SupervisedTasks(channel, wakeup.fileno())
        code, reason = 1, ""
        try:
            code = Controller(job, tasks, inbox).run()
        except ClusterError as error:
            # Another controller can't do it either.
            reason = str(error)
        tasks.finish(code, reason)
    except SupervisorLost:
        return 1
    except Exception:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return code
