"""The values that a job's decisions are made of: its state, what can happen to it, what can be done.

Frozen, and as pure as the decisions in `insitu.cluster.job`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from insitu.spec import TaskId

Phase = Literal["pending", "running", "stopping", "restarting", "finished", "failed", "stopped"]
Goal = Literal["", "decide", "finish", "stop"]
ENDED: frozenset[Phase] = frozenset({"finished", "failed", "stopped"})

Steps = tuple[int, int]
"""How far a job has come: (epoch, step)."""


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
class TaskState:
    """One task in the present attempt. `code` is negative for a signal, None while it runs or never ran.

    `asked` is the strongest signal sent to it so far, `escalate_at` when the next one is due.
    """

    task: TaskId
    alive: bool = False
    code: int | None = None
    asked: Literal["", "term", "kill"] = ""
    escalate_at: float | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of all tasks. `progress` is the furthest (epoch, step) any task was seen at."""

    number: int
    started: float
    ended: float | None = None
    cause: Cause | None = None
    progress: Steps | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything the decisions rest on. `died` lists this attempt's ended tasks in the order of their end."""

    max_restarts: int
    tasks: tuple[TaskState, ...]
    phase: Phase = "pending"
    goal: Goal = ""
    attempts: tuple[Attempt, ...] = ()
    died: tuple[TaskId, ...] = ()
    stall: Cause | None = None
    restart_at: float | None = None
    exit_code: int | None = None
    reason: str = ""

    @property
    def alive(self) -> tuple[TaskState, ...]:
        return tuple(t for t in self.tasks if t.alive)

    @property
    def due(self) -> float | None:
        """When a Tick is next needed, or None."""
        times = [t.escalate_at for t in self.alive if t.escalate_at is not None]
        return min((*times, *([] if self.restart_at is None else [self.restart_at])), default=None)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = plain(asdict(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobState:
        return cls(
            **{
                **data,
                "tasks": tuple(
                    TaskState(**{**t, "task": TaskId.parse(t["task"]), "failure": _failure(t["failure"])})
                    for t in data["tasks"]
                ),
                "attempts": tuple(
                    Attempt(
                        **{
                            **a,
                            "cause": _cause(a["cause"]),
                            "progress": a["progress"] and tuple(a["progress"]),
                        }
                    )
                    for a in data["attempts"]
                ),
                "died": tuple(TaskId.parse(t) for t in data["died"]),
                "stall": _cause(data["stall"]),
            }
        )


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
    """A task ended with `code` (negative: by that signal). `progress` is the job's furthest so far.

    `reporting` lists the living tasks whose progress records say that they train.
    """

    task: TaskId
    code: int
    failure: Failure | None = None
    progress: Steps | None = None
    reporting: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """These tasks of the attempt could not be started."""

    tasks: tuple[TaskId, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """No task has moved for the stall timeout; `text` names tasks, steps and places."""

    text: str
    progress: Steps | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked for the job to be stopped. Asked again, the tasks are killed at once."""


@dataclass(frozen=True, slots=True)
class ControllerLost:
    """The controller is gone and so is every task; nobody is left to act."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A time in `JobState.due` has come."""


Event = Submitted | TaskExited | LaunchFailed | Stalled | StopRequested | ControllerLost | Tick


# Actions: what is to be done about it.


@dataclass(frozen=True, slots=True)
class Launch:
    """Start every task, on fresh addresses."""

    attempt: int


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


Action = Launch | Signal | Say | Finish
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
        "attempts are at most one more than restarts allowed": len(state.attempts) <= state.max_restarts + 1,
        "attempts are numbered from 1": [a.number for a in state.attempts]
        == list(range(1, len(state.attempts) + 1)),
        "only the last attempt may be open": all(a.ended is not None for a in state.attempts[:-1]),
        "a living task has no exit code": all(t.code is None for t in state.alive),
        "only living tasks have deadlines": all(t.alive or t.escalate_at is None for t in state.tasks),
        "tasks that were asked to end have a deadline or are being killed": all(
            t.asked != "term" or t.escalate_at is not None for t in state.alive
        ),
        "the dead are no longer alive": not {t.task for t in state.alive} & set(state.died),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"{'; '.join(broken)}: {state}")
