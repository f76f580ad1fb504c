"""A job's life as a pure function: (state, event, now) -> (state, actions).

    pending ──> running ──> stopping ──> finished | failed | stopped
                   ^            │
                   └─ restarting ┘

While `running`, a task that dies puts the job into `stopping`: the rest is asked to end (SIGTERM), and made
to (SIGKILL) after a grace. Once nothing runs, `goal` decides what comes next. `now` is in seconds and never
goes back. When training is over:

- without a chief, when every worker has ended with 0; with one, when the chief has. Then
- workers that are left report progress or not. Those that do are still training and are waited for (the
  stall timeout bounds that); the others serve a coordinator that has gone, and are stopped after
  `WORKER_GRACE`;
- ps tasks, which never end by themselves, are stopped once no worker is left;
- the evaluator has `EVALUATOR_GRACE` from then on to end by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from insitu.spec import TaskId

Phase = Literal["pending", "running", "stopping", "restarting", "finished", "failed", "stopped"]
Goal = Literal["", "decide", "finish", "stop"]
ENDED: frozenset[Phase] = frozenset({"finished", "failed", "stopped"})

TERM_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""
DUMP_GRACE = 2.0
"""Seconds that stalled tasks have to write their stacks before they are stopped."""
WORKER_GRACE = 10.0
EVALUATOR_GRACE = 30.0
LONGEST_PAUSE = 30.0
STALL_CODE = 124
"""Exit code of a job that stood still, as that of timeout(1)."""
STOPPED_CODE = 128 + signal.SIGTERM

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
        return plain(asdict(self))

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

    `reporting` lists the living tasks that have written a progress record.
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


def new_job(tasks: Sequence[TaskId], max_restarts: int) -> JobState:
    return JobState(max_restarts, tuple(TaskState(t) for t in tasks))


def advance(state: JobState, event: Event, now: float) -> Result:
    """The state after `event` and what to do about it. An event that no longer matters changes nothing."""
    if state.phase in ENDED:
        return state, []
    match event:
        case Submitted():
            return _launch(state, now) if state.phase == "pending" else (state, [])
        case TaskExited():
            return _task_exited(state, event, now)
        case LaunchFailed():
            return _launch_failed(state, event, now)
        case Stalled():
            return _stalled(state, event, now)
        case StopRequested():
            return _stop_requested(state, now)
        case ControllerLost():
            return _controller_lost(state, now)
        case Tick():
            return _tick(state, now)


def _launch(state: JobState, now: float) -> Result:
    number = len(state.attempts) + 1
    tasks = tuple(TaskState(t.task, alive=True) for t in state.tasks)
    attempts = (*state.attempts, Attempt(number, now))
    state = replace(
        state, phase="running", goal="", tasks=tasks, attempts=attempts, died=(), stall=None, restart_at=None
    )
    said = (
        []
        if number == 1
        else [Say(f"attempt {number} starts (restart {number - 1} of {state.max_restarts})")]
    )
    return state, [*said, Launch(number)]


def _task_exited(state: JobState, event: TaskExited, now: float) -> Result:
    before = _task(state, event.task)
    if not before.alive:
        return state, []
    after = replace(before, alive=False, code=event.code, failure=event.failure, escalate_at=None)
    state = _with_task(_with_progress(state, event.progress), after)
    state = replace(state, died=(*state.died, event.task))
    actions: list[Action] = []
    if event.code != 0 and not before.asked:
        actions.append(Say(describe_exit(after)))
    if state.phase == "running" and event.code != 0 and not _training_is_over(state):
        state, more = _ask_all(replace(state, phase="stopping", goal="decide"), now)
        actions += more
    elif _training_is_over(state) and (state.phase == "running" or state.goal == "finish"):
        state, more = _release(replace(state, phase="stopping", goal="finish"), event.reporting, now)
        actions += more
    return _settle(state, actions, now)


def _training_is_over(state: JobState) -> bool:
    chief = [t for t in state.tasks if t.task.role == "chief"]
    needed = chief or [t for t in state.tasks if t.task.role == "worker"]
    return all(not t.alive and t.code == 0 for t in needed)


def _release(state: JobState, reporting: Sequence[TaskId], now: float) -> Result:
    """Lets go of the tasks that training no longer needs, in the order told at the top."""
    actions: list[Action] = []
    workers_left = any(t.task.role == "worker" for t in state.alive)
    for task in state.alive:
        if task.asked or task.escalate_at is not None:
            continue
        if task.task.role == "worker" and task.task not in reporting:
            state = _with_task(state, replace(task, escalate_at=now + WORKER_GRACE))
        elif task.task.role == "evaluator" and not workers_left:
            state = _with_task(state, replace(task, escalate_at=now + EVALUATOR_GRACE))
        elif task.task.role == "ps" and not workers_left:
            state, more = _escalate(state, task, now)
            actions += more
    return state, actions


def _launch_failed(state: JobState, event: LaunchFailed, now: float) -> Result:
    for name in event.tasks:
        state = _with_task(state, replace(_task(state, name), alive=False, code=None, escalate_at=None))
    actions: list[Action] = [Say(f"{', '.join(map(str, event.tasks))} could not be started: {event.message}")]
    if state.phase == "running":
        cause = Cause(f"{event.tasks[0]} could not be started: {event.message}", 1, event.tasks[0])
        state, more = _ask_all(replace(state, phase="stopping", goal="decide", stall=cause), now)
        actions += more
    return _settle(state, actions, now)


def _stalled(state: JobState, event: Stalled, now: float) -> Result:
    if state.phase not in ("running", "stopping") or any(t.asked for t in state.alive) or state.stall:
        return state, []
    goal: Goal = "finish" if state.goal == "finish" else "decide"
    cause = Cause(event.text, STALL_CODE)
    state = replace(_with_progress(state, event.progress), phase="stopping", goal=goal, stall=cause)
    actions: list[Action] = [Say(f"{event.text}; every task's stacks are in its log")]
    for task in state.alive:
        state = _with_task(state, replace(task, escalate_at=now + DUMP_GRACE))
        actions.append(Signal(task.task, "dump"))
    return state, actions


def _stop_requested(state: JobState, now: float) -> Result:
    if state.goal == "stop":
        actions: list[Action] = []
        for task in state.alive:
            if task.asked != "kill":
                state = _with_task(state, replace(task, asked="kill", escalate_at=None))
                actions.append(Signal(task.task, "kill"))
        return state, actions
    if state.goal == "finish":
        return _ask_all(state, now)
    told: list[Action] = [Say("stop was asked for; stopping every task")]
    state, asked = _ask_all(replace(state, phase="stopping", goal="stop", restart_at=None), now)
    return _settle(state, told + asked, now)


def _controller_lost(state: JobState, now: float) -> Result:
    text = "the job's controller died, and its tasks were ended with it"
    state = replace(state, tasks=tuple(replace(t, alive=False, escalate_at=None) for t in state.tasks))
    return _end(state, "failed", 1, text, Cause(text, 1), now)


def _tick(state: JobState, now: float) -> Result:
    if state.restart_at is not None and now >= state.restart_at:
        return _launch(state, now)
    actions: list[Action] = []
    for task in state.alive:
        if task.escalate_at is not None and now >= task.escalate_at:
            state, more = _escalate(state, task, now)
            actions += more
    return state, actions


def _ask_all(state: JobState, now: float) -> Result:
    actions: list[Action] = []
    for task in state.alive:
        if not task.asked:
            state, more = _escalate(state, task, now)
            actions += more
    return state, actions


def _escalate(state: JobState, task: TaskState, now: float) -> Result:
    """SIGTERM first; SIGKILL where that has been tried."""
    if task.asked == "":
        asked = replace(task, asked="term", escalate_at=now + TERM_GRACE)
        return _with_task(state, asked), [Signal(task.task, "term")]
    killed = replace(task, asked="kill", escalate_at=None)
    return _with_task(state, killed), [
        Say(f"{task.task} did not end within {TERM_GRACE:g} s of SIGTERM; killing it"),
        Signal(task.task, "kill"),
    ]


def _settle(state: JobState, actions: list[Action], now: float) -> Result:
    """Once nothing runs, what `goal` asks for."""
    if state.phase != "stopping" or state.alive:
        return state, actions
    if state.goal == "finish":
        state, more = _end(state, "finished", 0, "", None, now)
    elif state.goal == "stop":
        state, more = _end(state, "stopped", STOPPED_CODE, "stopped as asked", None, now)
    else:
        state, more = _decide(state, now)
    return state, actions + more


def _decide(state: JobState, now: float) -> Result:
    """Restart, or give up."""
    cause = find_cause(state)
    restarts = len(state.attempts) - 1
    if is_same_bug(state, cause):
        text = f"{cause.text}; the same traceback twice without progress in between, so it is not tried again"
        return _end(state, "failed", cause.code, text, cause, now)
    if restarts >= state.max_restarts:
        text = f"{cause.text}; {restarts} of {state.max_restarts} restarts were used"
        return _end(state, "failed", cause.code, text, cause, now)
    pause = min(LONGEST_PAUSE, 2.0**restarts)
    state = _close_attempt(state, cause, now)
    state = replace(state, phase="restarting", goal="", stall=None, restart_at=now + pause)
    return state, [
        Say(f"{cause.text}; restarting every task in {pause:g} s ({restarts + 1} of {state.max_restarts})")
    ]


def find_cause(state: JobState) -> Cause:
    """What the attempt ended of: not those whom it took down with it.

    A stall or a failed launch counts first. Then tasks that ended before they were asked to, or by a
    signal that wasn't ours; those that only lost a peer come last; else whoever was first.
    """
    if state.stall:
        return state.stall
    suspects = [
        task
        for task in (_task(state, name) for name in state.died)
        if task.code and (not task.asked or (task.code < 0 and not _is_ours(task)))
    ]
    suspects.sort(key=lambda t: bool(t.failure and t.failure.peer_lost))
    guilty = suspects[0] if suspects else _task(state, state.died[-1])
    fingerprint = guilty.failure.fingerprint if guilty.failure else ""
    return Cause(describe_exit(guilty), exit_code_of(guilty.code or 0), guilty.task, fingerprint)


def _is_ours(task: TaskState) -> bool:
    sent = {"term": {signal.SIGTERM}, "kill": {signal.SIGTERM, signal.SIGKILL}, "": set()}[task.asked]
    return -(task.code or 0) in sent


def is_same_bug(state: JobState, cause: Cause) -> bool:
    """Whether the attempt before ended of the same traceback and this one came no further."""
    if len(state.attempts) < 2 or not cause.fingerprint:
        return False
    before, this = state.attempts[-2], state.attempts[-1]
    if before.cause is None or before.cause.fingerprint != cause.fingerprint:
        return False
    return (this.progress or (-1, -1)) <= (before.progress or (-1, -1))


def describe_exit(task: TaskState) -> str:
    """Such as `worker:1 was killed by SIGKILL`."""
    if task.code is None:
        return f"{task.task} did not run"
    if task.code < 0:
        return f"{task.task} was killed by {_signal_name(-task.code)}"
    why = f": {task.failure.type}: {task.failure.message}" if task.failure else ""
    return f"{task.task} ended with exit code {task.code}{why}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(code: int) -> int:
    """The shell's way: 128 + the signal's number for a task that a signal ended."""
    return 128 - code if code < 0 else code


def _end(state: JobState, phase: Phase, code: int, reason: str, cause: Cause | None, now: float) -> Result:
    state = _close_attempt(state, cause, now)
    state = replace(state, phase=phase, goal="", restart_at=None, exit_code=code, reason=reason)
    told = f"job {phase}{f' with exit code {code}: {reason}' if phase == 'failed' else ''}"
    return state, [Say(told), Finish(code)]


def _close_attempt(state: JobState, cause: Cause | None, now: float) -> JobState:
    if not state.attempts or state.attempts[-1].ended is not None:
        return state
    return replace(
        state, attempts=(*state.attempts[:-1], replace(state.attempts[-1], ended=now, cause=cause))
    )


def _with_progress(state: JobState, progress: Steps | None) -> JobState:
    if progress is None or not state.attempts:
        return state
    last = state.attempts[-1]
    best = max(progress, last.progress or progress)
    return replace(state, attempts=(*state.attempts[:-1], replace(last, progress=best)))


def _task(state: JobState, name: TaskId) -> TaskState:
    return next(t for t in state.tasks if t.task == name)


def _with_task(state: JobState, task: TaskState) -> JobState:
    return replace(state, tasks=tuple(task if t.task == task.task else t for t in state.tasks))


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
