"""A job's life as a pure function: (state, event, now) -> (state, actions).

    pending ──> running ──> stopping ──> finished | failed | stopped
                   ^            │
                   └─ restarting ┘

While `running`, a task that dies puts the job into `stopping`: the rest is asked to end (SIGTERM), and made
to (SIGKILL) after a grace. Once nothing runs, `goal` decides what comes next. `now` is in seconds and never
goes back. When training is over:

- without a chief, when every worker has ended with 0; with one, when the chief has. Then
- workers that are left report progress or not. Those that do are still training and are waited for (the
  stall timeout bounds that); the others have done so, or serve a coordinator that has gone, and are stopped
  after `WORKER_GRACE`;
- ps tasks, which never end by themselves, are stopped once no worker is left;
- the evaluator has `EVALUATOR_GRACE` from then on to end by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from insitu.cluster.job_state import (
    ENDED,
    Action,
    Attempt,
    Cause,
    ControllerLost,
    Event,
    Finish,
    Goal,
    JobState,
    Launch,
    LaunchFailed,
    Phase,
    Result,
    Say,
    Signal,
    Stalled,
    Steps,
    StopRequested,
    Submitted,
    TaskExited,
    TaskState,
    Tick,
)
from insitu.spec import TaskId

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
    # Losing a peer is no bug of the script, however often it looks the same.
    fingerprint = guilty.failure.fingerprint if guilty.failure and not guilty.failure.peer_lost else ""
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
