"""The values that a job's decisions are made of: its state, what can happen to it, what can be done.

Frozen, and as pure as the decisions in `insitu.cluster.decide.job`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from insitu.cluster.decide.layout import Holders
from insitu.spec import NodeId, TaskId

Phase = Literal["pending", "running", "stopping", "restarting", "finished", "failed", "stopped"]
Goal = Literal["", "decide", "finish", "stop"]
ENDED: frozenset[Phase] = frozenset({"finished", "failed", "stopped"})

Steps = tuple[int, int]
"""How far a job has come: (epoch, step)."""
OnLoss = Literal["replace", "adopt", "restart"]
"""What a job does when it loses a task that others can go on without; see `recovery.py`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a task wrote about its own end. `fingerprint` is equal for equal tracebacks, "" without one.

    `peer_lost` is True where the task only failed because another one had gone.
    """

    type: str
    message: str
    fingerprint: str
    peer_lost: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt ended. `task` is None where no single task is to blame; `code` is an exit code."""

    text: str
    code: int
    task: TaskId | None = None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Bug:
    """The last Python traceback that a task failed with: its fingerprint, how far the job was, and when."""

    fingerprint: str
    progress: Steps
    at: float


@dataclass(frozen=True, slots=True)
class TaskState:
    """One task. `attempt` numbers its lives from 1; `shards` are those it runs, or ran when it was lost.

    `code` is negative for a signal, None while it runs or never ran. `asked` is the strongest signal sent to
    it so far, `escalate_at` when the next one is due, `launch_at` when its next life begins. `stalled` says
    why it is being killed where it stood still.

    `member`: the roster names it. `released`: the job does without it from now on, and its end is no
    failure. `replacement`: this life joined a job under way. `died_at` is how far the job was when the task
    last died, `streak` how often in a row it died without the job having moved.
    """

    task: TaskId
    node: NodeId | None = None
    shards: tuple[int, ...] = ()
    attempt: int = 0
    pid: int = 0
    alive: bool = False
    code: int | None = None
    asked: Literal["", "term", "kill"] = ""
    escalate_at: float | None = None
    launch_at: float | None = None
    failure: Failure | None = None
    stalled: str = ""
    member: bool = True
    released: bool = False
    replacement: bool = False
    started: float = 0.0
    died_at: Steps | None = None
    streak: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all tasks. `progress` is the furthest (epoch, step) any task was seen at."""

    number: int
    started: float
    ended: float | None = None
    cause: Cause | None = None
    progress: Steps | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """Membership changed while training went on.

    `how` is what was done: a task "replaced" or its shards "adopted", tasks "joined", "released" or
    "reconnected". `generation` is that of the roster that followed, `steps` how far the job was; `ended` when
    every member had completed a step after it, None where that is still to come or never came.
    """

    how: Literal["replaced", "adopted", "joined", "released", "reconnected"]
    tasks: tuple[TaskId, ...]
    text: str
    at: float
    generation: int
    steps: Steps | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything the decisions rest on. `died` lists this attempt's dead tasks in the order of their end.

    `wanted` is the number of workers asked for; `failures` counts towards `max_restarts`; `generation` is
    that of the newest roster; `holders` says which nodes hold which shards, `lost` which
    nodes lost their store; `mirrored`: what a ps task holds is on another one, too.
    """

    max_restarts: int
    tasks: tuple[TaskState, ...]
    on_loss: OnLoss = "replace"
    wanted: int = 0
    holders: Holders = ()
    phase: Phase = "pending"
    goal: Goal = ""
    attempts: tuple[Attempt, ...] = ()
    died: tuple[TaskId, ...] = ()
    stall: Cause | None = None
    restart_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    generation: int = 0
    lost: tuple[NodeId, ...] = ()
    failures: int = 0
    bug: Bug | None = None
    recoveries: tuple[Recovery, ...] = ()
    mirrored: bool = False

    @property
    def served(self) -> bool:
        """Whether ps tasks hold the model, so that workers need no other worker's state."""
        return any(t.task.role == "ps" for t in self.tasks)

    @property
    def alive(self) -> tuple[TaskState, ...]:
        return tuple(t for t in self.tasks if t.alive)

    @property
    def members(self) -> tuple[TaskState, ...]:
        """The workers that the roster names, by rank."""
        return tuple(t for t in self.tasks if t.task.role == "worker" and t.member)

    def task(self, name: TaskId) -> TaskState:
        return next(t for t in self.tasks if t.task == name)

    def with_task(self, *tasks: TaskState) -> JobState:
        """This state with these tasks in the place of those of the same names."""
        new = {t.task: t for t in tasks}
        return replace(self, tasks=tuple(new.get(t.task, t) for t in self.tasks))

    def with_progress(self, progress: Steps | None) -> JobState:
        if progress is None or not self.attempts:
            return self
        last = self.attempts[-1]
        best = max(progress, last.progress or progress)
        return replace(self, attempts=(*self.attempts[:-1], replace(last, progress=best)))

    @property
    def due(self) -> float | None:
        """When a Tick is next needed, or None."""
        times = [t.escalate_at for t in self.alive if t.escalate_at is not None]
        times += [t.launch_at for t in self.tasks if t.launch_at is not None]
        return min((*times, *([] if self.restart_at is None else [self.restart_at])), default=None)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = plain(asdict(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobState:
        return cls(
            **{
                **data,
                "tasks": tuple(map(_task, data["tasks"])),
                "holders": tuple(map(tuple, data.get("holders", ()))),
                "attempts": tuple(
                    Attempt(**{**a, "cause": _cause(a["cause"]), "progress": _steps(a["progress"])})
                    for a in data["attempts"]
                ),
                "lost": tuple(data.get("lost", ())),
                "died": _tasks(data["died"]),
                "stall": _cause(data["stall"]),
                "bug": _bug(data.get("bug")),
                "recoveries": tuple(
                    Recovery(**{**r, "tasks": _tasks(r["tasks"]), "steps": _steps(r["steps"])})
                    for r in data.get("recoveries", ())
                ),
            }
        )


def _tasks(names: Sequence[str]) -> tuple[TaskId, ...]:
    return tuple(map(TaskId.parse, names))


def _task(data: Mapping[str, Any]) -> TaskState:
    return TaskState(
        **{
            **data,
            "task": TaskId.parse(data["task"]),
            "failure": _failure(data["failure"]),
            "shards": tuple(data.get("shards", ())),
            "died_at": _steps(data.get("died_at")),
        }
    )


def _steps(data: Sequence[int] | None) -> Steps | None:
    return (data[0], data[1]) if data else None


def _bug(data: Mapping[str, Any] | None) -> Bug | None:
    return Bug(data["fingerprint"], (data["progress"][0], data["progress"][1]), data["at"]) if data else None


def _failure(data: Mapping[str, Any] | None) -> Failure | None:
    return Failure(**data) if data else None


def _cause(data: Mapping[str, Any] | None) -> Cause | None:
    return Cause(**{**data, "task": TaskId.parse(data["task"]) if data["task"] else None}) if data else None


def plain(value: Any) -> Any:
    """`value` with tasks as text and tuples as lists; `asdict` has turned a TaskId into a dict of two."""
    if isinstance(value, dict):
        if value.keys() == {"role", "index"}:
            return f"{value['role']}:{value['index']}"
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


# Events: what has happened.


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job may begin."""


@dataclass(frozen=True, slots=True)
class TaskExited:
    """Life `attempt` of a task ended with `code` (negative: by that signal).

    `progress` is the job's furthest so far. Of the living tasks, `reporting` are those whose progress records
    say that they train, `elastic` those that can go on without a peer, `recovering` those that say that they
    have lost one. `lost` are nodes whose store is gone.
    """

    task: TaskId
    code: int
    failure: Failure | None = None
    progress: Steps | None = None
    reporting: tuple[TaskId, ...] = ()
    elastic: tuple[TaskId, ...] = ()
    lost: tuple[NodeId, ...] = ()
    attempt: int | None = None
    recovering: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """These tasks could not be started."""

    tasks: tuple[TaskId, ...]
    message: str
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class Launched:
    """These tasks' lives have begun: (task, process id) each."""

    processes: tuple[tuple[TaskId, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """These tasks, which the roster doesn't name yet, are ready to join."""

    tasks: tuple[TaskId, ...]
    progress: Steps | None = None


@dataclass(frozen=True, slots=True)
class PeersParted:
    """These members say that they have lost a peer, yet none has died: connections between them broke."""

    tasks: tuple[TaskId, ...]
    progress: Steps | None = None
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovered:
    """Every member has completed a step in the newest generation, or has ended its training in it."""

    generation: int


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """Somebody asked for `workers` workers. `token` is what the request is known by."""

    workers: int
    token: str = ""
    progress: Steps | None = None
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has moved for the stall timeout; `text` names tasks, steps and places.

    `culprits` are the tasks that all others wait for; empty where that can't be told.
    """

    text: str
    progress: Steps | None = None
    culprits: tuple[TaskId, ...] = ()
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked for the job to be stopped. Asked again, the tasks are killed at once."""


@dataclass(frozen=True, slots=True)
class ControllerLost:
    """Nothing of the job runs any more, and nobody is left to act."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The controller died and a new one goes on in its place; tasks have not been touched."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Somebody asked for a job that has ended without having finished to go on."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A time in `JobState.due` has come."""


Event = (
    Submitted
    | TaskExited
    | LaunchFailed
    | Launched
    | Ready
    | PeersParted
    | Recovered
    | ScaleRequested
    | Stalled
    | StopRequested
    | ControllerLost
    | TakenOver
    | Resumed
    | Tick
)


# Actions: what is to be done about it.


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the roster of this generation, with fresh addresses for whoever has none yet."""

    generation: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Begin the next life of these tasks; each task's state says which."""

    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """Send `name` to the task and to whatever it has started."""

    task: TaskId
    name: Literal["term", "kill", "dump"]


@dataclass(frozen=True, slots=True)
class Say:
    """Tell those who watch the job."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over."""

    exit_code: int


Action = Publish | Launch | Signal | Say | Finish
Result = tuple[JobState, list[Action]]


def validate(state: JobState) -> None:
    """Raises ValueError where an invariant doesn't hold. Run by the tests after every event."""
    rules = {
        "only running and stopping jobs have living tasks": not state.alive
        or state.phase in ("running", "stopping"),
        "a stopping job has a goal and something to wait for": state.phase != "stopping"
        or bool(state.goal and state.alive),
        "a job that isn't stopping has no goal": state.phase == "stopping" or not state.goal,
        "a restart is due exactly while restarting": (state.restart_at is not None)
        == (state.phase == "restarting"),
        "an exit code is known exactly when the job has ended": (state.exit_code is not None)
        == (state.phase in ENDED),
        "failures are at most as many as allowed": state.failures <= state.max_restarts,
        "attempts are numbered from 1": [a.number for a in state.attempts]
        == list(range(1, len(state.attempts) + 1)),
        "only the last attempt may be open": all(a.ended is not None for a in state.attempts[:-1]),
        "a living task has no exit code": all(t.code is None for t in state.alive),
        "only living tasks have deadlines": all(t.alive or t.escalate_at is None for t in state.tasks),
        "a living task is not about to be launched": all(t.launch_at is None for t in state.alive),
        "only a running job launches single tasks": state.phase == "running"
        or all(t.launch_at is None for t in state.tasks),
        "members run each shard once": not state.holders
        or state.phase != "running"
        or sorted(s for t in state.members for s in t.shards) == list(range(len(state.holders))),
        "a released task is no member": not any(t.released and t.member for t in state.tasks),
        "tasks that were asked to end have a deadline or are being killed": all(
            t.asked != "term" or t.escalate_at is not None for t in state.alive
        ),
        "the dead are no longer alive": not {t.task for t in state.alive} & set(state.died),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"{'; '.join(broken)}: {state}")
