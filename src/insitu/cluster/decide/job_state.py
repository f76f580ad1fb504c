"""The state of a job: what the decisions in `insitu.cluster.decide.job` rest on. Frozen, and as pure as they.

Only the decisions make new states; the controller keeps the newest one and the journal has each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from insitu.base.spec import NodeId, TaskId
from insitu.cluster.decide.layout import ShardHolders

Phase = Literal["pending", "running", "stopping", "restarting", "finished", "failed", "stopped"]
Goal = Literal["", "decide", "finish", "fail", "stop"]
"""The step of a stopping job once nothing of it runs: decide whether to restart, finish, fail, or stop."""
ENDED: frozenset[Phase] = frozenset({"finished", "failed", "stopped"})

EpochStep = tuple[int, int]
"""How far a job has come: (epoch, step), both from 0; -1 before the first."""
EVALUATOR_GRACE = 30.0
"""Seconds that an evaluator which doesn't know insitu has to end once training is over."""
OnLoss = Literal["replace", "adopt", "restart"]
"""The policy of a job that loses a task that others can continue without; see `recovery.py`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A task's record of its own end: an exception, or an exit with a code that the script chose."""

    #: Name of the exception's class.
    type: str
    #: The exception's text; "" for an exit with a number.
    message: str
    #: Equal for equal tracebacks; "" without one.
    fingerprint: str
    #: The task only failed because another one had gone.
    peer_lost: bool = False
    #: Another attempt would end the same way.
    final: bool = False
    #: It looks like a mistake in the script or what it was given, not like something that passes.
    mistake: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt ended."""

    #: The reason, for the user.
    text: str
    #: The exit code that the job ends with if it isn't tried again.
    code: int
    #: The task to blame, None if no single one is.
    task: TaskId | None = None
    #: That of the task's failure, "" without one.
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Bug:
    """The last failure of the script's own that a task ended with."""

    #: That of the failure.
    fingerprint: str
    #: How far the job was then.
    progress: EpochStep
    #: When it was seen, in seconds since 1970.
    at: float


@dataclass(frozen=True, slots=True)
class TaskState:
    """One task, through all of its incarnations."""

    #: Role and index.
    task: TaskId
    #: The node that it runs on, or will run on.
    node: NodeId | None = None
    #: The shards that it runs, or ran when it was lost.
    shards: tuple[int, ...] = ()
    #: Number of the present or last incarnation, from 1; 0 before the first.
    incarnation: int = 0
    #: Process id of that incarnation; 0 until the engine has reported it.
    pid: int = 0
    #: The incarnation runs, or is being launched.
    alive: bool = False
    #: Exit code, negative for a signal; None while it runs or never ran.
    code: int | None = None
    #: The strongest signal sent to the incarnation so far.
    signal_sent: Literal["", "term", "kill"] = ""
    #: When the next signal is due, in seconds since 1970; None if none is.
    escalate_at: float | None = None
    #: When the next incarnation will be launched, in seconds since 1970; None if none is.
    launch_at: float | None = None
    #: The last incarnation's record of its own end.
    failure: Failure | None = None
    #: The node of its next incarnation, for which it is being stopped; None if it doesn't move.
    move_to: NodeId | None = None
    #: Why it is being killed for having stood still, for the user; "" if it isn't.
    stall_reason: str = ""
    #: The roster names it.
    member: bool = True
    #: The job does without it from now on, and its end is no failure.
    released: bool = False
    #: The incarnation joined a job under way.
    replacement: bool = False
    #: When the incarnation was launched, in seconds since 1970.
    started: float = 0.0
    #: How far the job was when the task last died.
    progress_at_death: EpochStep | None = None
    #: How often in a row it died, or could not be launched, without the job having come further.
    failures_in_a_row: int = 0

    @property
    def has_ended_well(self) -> bool:
        """Whether the last incarnation has ended with 0."""
        return not self.alive and self.code == 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all tasks of a job."""

    #: Counted from 1.
    number: int
    #: When it was launched, in seconds since 1970.
    started: float
    #: When its last task had ended, in seconds since 1970; None while it runs.
    ended: float | None = None
    #: Why it ended; None while it runs, and if it finished or was stopped.
    cause: Cause | None = None
    #: The furthest (epoch, step) that any task was seen at.
    progress: EpochStep | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """One change of membership while training continued."""

    #: The kind of change: tasks replaced, their shards adopted, tasks joined, released, reconnected or moved
    #: to other nodes.
    how: Literal["replaced", "adopted", "joined", "released", "reconnected", "moved"]
    #: The tasks that it was done to.
    tasks: tuple[TaskId, ...]
    #: The reason, for the user.
    text: str
    #: When it was decided, in seconds since 1970.
    at: float
    #: That of the roster that followed.
    generation: int
    #: How far the job was.
    steps: EpochStep | None = None
    #: When every member had completed a step after it; None if that is still to come or never came.
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that the decisions rest on."""

    #: Failures after which the job isn't tried again.
    max_restarts: int
    #: In order of role, then index.
    tasks: tuple[TaskState, ...]
    #: The policy for a lost task.
    on_loss: OnLoss = "replace"
    #: Number of workers that the job should have.
    target_workers: int = 0
    #: For each shard the nodes that hold it.
    holders: ShardHolders = ()
    #: The phase of the job; see `job.py`.
    phase: Phase = "pending"
    #: The goal once nothing runs; "" unless stopping.
    goal: Goal = ""
    #: Every start of all tasks, in order.
    attempts: tuple[Attempt, ...] = ()
    #: Tasks of this attempt that have ended, in the order of their end.
    died: tuple[TaskId, ...] = ()
    #: Why the attempt is being ended, if no task's end shows it: a stall, a failed launch, lost connections.
    stop_cause: Cause | None = None
    #: When all tasks will be launched again, in seconds since 1970; None unless restarting.
    restart_at: float | None = None
    #: The job's exit code; None until it has ended.
    exit_code: int | None = None
    #: Why it ended, for the user.
    reason: str = ""
    #: That of the newest roster.
    generation: int = 0
    #: Nodes that have lost their store.
    lost_nodes: tuple[NodeId, ...] = ()
    #: Nodes that will leave the cluster: nothing is launched there if another node will do.
    leaving_nodes: tuple[NodeId, ...] = ()
    #: Failures that count towards `max_restarts`: those that the job hasn't outlived (`restart_budget.py`).
    failures: int = 0
    #: The furthest that the job was when it failed; None before its first failure.
    failure_progress: EpochStep | None = None
    #: When it last failed, in seconds since 1970.
    failure_at: float = 0.0
    #: Failures of the evaluator so far, which have a budget of their own of `max_restarts`.
    evaluator_failures: int = 0
    #: Seconds that the evaluator has to end by itself once training is over.
    evaluator_grace: float = EVALUATOR_GRACE
    #: The last failure of the script's own.
    bug: Bug | None = None
    #: The last changes of membership, in order.
    recoveries: tuple[Recovery, ...] = ()
    #: The content of a ps task is on another one, too.
    mirrored: bool = False

    @property
    def has_servers(self) -> bool:
        """Whether ps tasks hold the model, so that workers need no other worker's state."""
        return any(t.task.role == "ps" for t in self.tasks)

    @property
    def closed_nodes(self) -> tuple[NodeId, ...]:
        """The nodes on which nothing is launched."""
        return (*self.lost_nodes, *self.leaving_nodes)

    @property
    def alive(self) -> tuple[TaskState, ...]:
        return tuple(t for t in self.tasks if t.alive)

    def is_chief(self, task: TaskId) -> bool:
        """Return whether `task` is the chief: the task of that role, else worker 0."""
        has_chief = any(t.task.role == "chief" for t in self.tasks)
        return task.role == "chief" or (not has_chief and task == TaskId("worker", 0))

    @property
    def members(self) -> tuple[TaskState, ...]:
        """The workers that the roster names, by rank."""
        return tuple(t for t in self.tasks if t.task.role == "worker" and t.member)

    @property
    def ended_before_others(self) -> tuple[TaskId, ...]:
        """The workers whose scripts have ended well, and which are no members any more."""
        workers = (t for t in self.tasks if t.task.role == "worker" and not t.member and not t.released)
        return tuple(t.task for t in workers if t.has_ended_well)

    def task(self, name: TaskId) -> TaskState:
        return next(t for t in self.tasks if t.task == name)

    def with_task(self, *tasks: TaskState) -> JobState:
        """Return this state with these tasks in the place of those of the same names."""
        new = {t.task: t for t in tasks}
        return replace(self, tasks=tuple(new.get(t.task, t) for t in self.tasks))

    def with_progress(self, progress: EpochStep | None) -> JobState:
        """Return this state with the present attempt at `progress` at least."""
        if progress is None or not self.attempts:
            return self
        last = self.attempts[-1]
        best = max(progress, last.progress or progress)
        return replace(self, attempts=(*self.attempts[:-1], replace(last, progress=best)))

    def bound_due_times(self, latest: float) -> JobState:
        """Return this state with nothing due after `latest`: the controller before may have had another
        clock, since the machine's was set back."""
        tasks = tuple(
            replace(
                task,
                escalate_at=None if task.escalate_at is None else min(task.escalate_at, latest),
                launch_at=None if task.launch_at is None else min(task.launch_at, latest),
            )
            for task in self.tasks
        )
        restart_at = None if self.restart_at is None else min(self.restart_at, latest)
        return replace(self, tasks=tasks, restart_at=restart_at)

    @property
    def due(self) -> float | None:
        """When a TickEvent is next needed, in seconds since 1970, or None."""
        times = [t.escalate_at for t in self.alive if t.escalate_at is not None]
        times += [t.launch_at for t in self.tasks if t.launch_at is not None]
        return min((*times, *([] if self.restart_at is None else [self.restart_at])), default=None)


def validate(state: JobState) -> None:
    """Raise ValueError if an invariant doesn't hold. The tests call it after every event."""
    evaluators = (t for t in state.tasks if t.task.role == "evaluator" and state.goal == "finish")
    last_scores = {t.task for t in evaluators if t.launch_at is not None}
    rules = {
        "only running and stopping jobs have running tasks": not state.alive
        or state.phase in ("running", "stopping"),
        "a stopping job has a goal and something to wait for": state.phase != "stopping"
        or bool(state.goal and (state.alive or last_scores)),
        "a job that isn't stopping has no goal": state.phase == "stopping" or not state.goal,
        "a restart is due exactly while restarting": (state.restart_at is not None)
        == (state.phase == "restarting"),
        "an exit code is known exactly when the job has ended": (state.exit_code is not None)
        == (state.phase in ENDED),
        "failures are at most as many as allowed": state.failures <= state.max_restarts,
        "the evaluator's failures are at most as many as allowed": state.evaluator_failures
        <= state.max_restarts,
        "no attempt ended of the evaluator": not any(
            a.cause and a.cause.task and a.cause.task.role == "evaluator" for a in state.attempts
        ),
        "attempts are numbered from 1": [a.number for a in state.attempts]
        == list(range(1, len(state.attempts) + 1)),
        "only the last attempt may be open": all(a.ended is not None for a in state.attempts[:-1]),
        "a running task has no exit code": all(t.code is None for t in state.alive),
        "only running tasks have deadlines": all(t.alive or t.escalate_at is None for t in state.tasks),
        "a running task is not about to be launched": all(t.launch_at is None for t in state.alive),
        "only a running job launches single tasks, but for an evaluator": state.phase == "running"
        or all(t.launch_at is None for t in state.tasks if t.task not in last_scores),
        "members run each shard once": not state.holders
        or state.phase != "running"
        or sorted(s for t in state.members for s in t.shards) == list(range(len(state.holders))),
        "a task that moves is being stopped": all(
            t.alive and bool(t.signal_sent) for t in state.tasks if t.move_to is not None
        ),
        "a released task is no member": not any(t.released and t.member for t in state.tasks),
        "tasks that got SIGTERM have a deadline or are being killed": all(
            t.signal_sent != "term" or t.escalate_at is not None for t in state.alive
        ),
        "the dead are no longer alive": not {t.task for t in state.alive} & set(state.died),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"{'; '.join(broken)}: {state}")
