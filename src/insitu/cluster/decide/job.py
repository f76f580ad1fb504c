"""Decides about a job, as a pure function: (state, event, now) -> (state, actions).

    pending ──> running ──> stopping ──> finished | failed | stopped
       ^           └─ restarting ┘                     │ resumed
       └───────────────────────────────────────────────┘

While `running`, a task that dies is replaced alone if the others can continue without it meanwhile (see
`insitu.cluster.decide.recovery`). Otherwise its death puts the job into `stopping`: the rest gets SIGTERM,
and SIGKILL after a grace. Once nothing runs, `goal` decides what comes next. `now` is in seconds and never
goes back. When training is over:

- without a chief, when every worker has ended with 0; with one, when the chief has. Then
- workers that are left report progress or not. Those that do are still training and are waited for (the
  stall timeout bounds that); the others have done so, or serve a coordinator that has gone, and are stopped
  after `WORKER_GRACE`;
- ps tasks, which never end by themselves, are stopped once no worker is left;
- if worker 0 has ended with 0 and the workers that are left have never reported progress, nobody knows
  whether they train. Once they have neither printed nor computed for the stall timeout, they are stopped (see
  `LeftAloneEvent`). With ps tasks the job has finished; without, it has failed, and isn't tried again;
- the roster says so to the evaluator, which has `JobState.evaluator_grace` to score the last checkpoint and
  end by itself (see `insitu.cluster.decide.job`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from insitu.base.spec import TaskId, TaskSpec
from insitu.cluster.decide import moves, recovery, restart_budget
from insitu.cluster.decide.events import (
    Action,
    ControllerLostEvent,
    DataMovedEvent,
    Event,
    Finish,
    Launch,
    LaunchedEvent,
    LaunchFailedEvent,
    LeaveEvent,
    LeftAloneEvent,
    Log,
    MoveEvent,
    PeersLostEvent,
    Publish,
    ReadyEvent,
    RecoveredEvent,
    Result,
    ResumedEvent,
    ScaleRequestedEvent,
    Signal,
    StalledEvent,
    StopRequestedEvent,
    SubmittedEvent,
    TakenOverEvent,
    TaskExitedEvent,
    TickEvent,
)
from insitu.cluster.decide.job_state import (
    ENDED,
    EVALUATOR_GRACE,
    Attempt,
    Bug,
    Cause,
    Goal,
    JobState,
    OnLoss,
    Phase,
    TaskState,
)
from insitu.cluster.decide.layout import ShardHolders, assign_contiguous_shards, choose_node
from insitu.cluster.decide.recovery import describe_exit, find_cause

TERM_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""
DUMP_GRACE = 2.0
"""Seconds that stalled tasks have to write their stacks before they are stopped."""
WORKER_GRACE = 10.0
"""Seconds that workers which don't train have to end once training is over."""
LONGEST_DELAY = max(
    TERM_GRACE, WORKER_GRACE, EVALUATOR_GRACE, recovery.RELEASE_GRACE, recovery.MAX_RESTART_DELAY
)
"""Seconds that nothing but a longer grace of the evaluator is due later than when it is decided."""
STALL_CODE = 124
"""Exit code of a job that stood still, as that of timeout(1)."""
SYSTEM_EXIT = "SystemExit"
"""Type of the failure of a script that has chosen its exit code: its own doing, like an exception."""
STOPPED_CODE = 128 + signal.SIGTERM
NO_CHECKPOINT = (
    "the job's folder has no checkpoint: without one elsewhere its script starts from its beginning"
)


def new_job(
    tasks: Sequence[TaskSpec],
    max_restarts: int,
    on_loss: OnLoss = "replace",
    holders: ShardHolders = (),
    *,
    mirrored: bool = False,
    evaluator_grace: float = EVALUATOR_GRACE,
) -> JobState:
    """Return the state of a job that begins."""
    states = tuple(TaskState(t.task, t.node, t.shards) for t in tasks)
    wanted = sum(t.task.role == "worker" for t in tasks)
    state = JobState(max_restarts, states, on_loss, wanted, holders, mirrored=mirrored)
    return replace(state, evaluator_grace=evaluator_grace)


def advance(state: JobState, event: Event, now: float) -> Result:
    """Return the state after `event`, and what to do. An event that no longer matters changes nothing."""
    if isinstance(event, ResumedEvent):
        return _handle_resume(state)
    if state.phase in ENDED:
        return state, []
    match event:
        case SubmittedEvent():
            return _begin(state, event, now) if state.phase == "pending" else (state, [])
        case TaskExitedEvent():
            return _handle_task_exit(state, event, now)
        case LaunchFailedEvent():
            return _handle_launch_failure(state, event, now)
        case LaunchedEvent():
            pids = dict(event.processes)
            return state.with_task(*(replace(state.task(t), pid=pid) for t, pid in pids.items())), []
        case StalledEvent():
            return _handle_stall(state, event, now)
        case LeftAloneEvent():
            return _handle_left_alone(state, event, now)
        case StopRequestedEvent():
            state, actions = _handle_stop_request(state, now)
            return state, [*recovery.reply(event.token, "stopping every task"), *actions]
        case ControllerLostEvent():
            return _handle_controller_loss(state, event, now)
        case TakenOverEvent():
            state = state.bound_due_times(now + max(LONGEST_DELAY, state.evaluator_grace))
            return state, [Log("the job's controller died; a new one has taken over, training continues")]
        case TickEvent():
            return _handle_tick(state, now)
        case ReadyEvent():
            return recovery.add_ready_tasks(state, event, now)
        case RecoveredEvent():
            return recovery.close_recoveries(state, event, now)
        case ScaleRequestedEvent():
            return recovery.scale(state, event, now)
        case DataMovedEvent():
            return moves.record_data_moved(state, event)
        case MoveEvent():
            return moves.start_moves(state, event, now)
        case LeaveEvent():
            cause = moves.leave_node(state, event)
            return (state, []) if cause is None else _fail_attempt(state, cause, now)
        case PeersLostEvent():
            reconnected = recovery.reconnect_peers(state, event, now)
            return reconnected or _fail_attempt(state, recovery.describe_lost_peers(event), now)


def _launch_all(state: JobState, now: float, why: str = "") -> Result:
    """Launch a new incarnation of every task: the next attempt."""
    number = len(state.attempts) + 1
    layout = assign_contiguous_shards(state.target_workers, len(state.holders)) if state.holders else ()
    tasks = []
    for task in state.tasks:
        if task.task.role == "worker" and task.task.index >= state.target_workers:
            tasks.append(replace(task, member=False, released=True, shards=(), launch_at=None))
            continue
        shards, node = task.shards, task.node
        if task.task.role == "worker" and layout:
            shards = layout[task.task.index]
            node = (
                node
                if node and node not in state.closed_nodes
                else choose_node(shards, state.holders, state.closed_nodes) or node
            )
        elif task.task.role != "worker":
            node = recovery.choose_next_node(state, task)
        task = recovery.begin_incarnation(task, now)
        tasks.append(replace(task, node=node, shards=shards, member=True, released=False, replacement=False))
    attempts = (*state.attempts, Attempt(number, now))
    generation = state.generation + 1
    state = replace(
        state, phase="running", goal="", tasks=tuple(tasks), attempts=attempts, died=(), stop_cause=None,
        restart_at=None, generation=generation,
    )  # fmt: skip
    why = why or f"restart {state.failures} of {state.max_restarts}"
    logs = [] if number == 1 else [Log(f"attempt {number} starts ({why})")]
    return state, [*logs, Publish(generation), Launch(tuple(t.task for t in state.alive))]


def _begin(state: JobState, event: SubmittedEvent, now: float) -> Result:
    if not state.attempts:
        return _launch_all(state, now)
    # Tasks say which checkpoint they have read.
    why = "resumed" if event.has_checkpoint else f"resumed; {NO_CHECKPOINT}"
    return _launch_all(replace(state, lost_nodes=event.lost), now, why)


def _handle_resume(state: JobState) -> Result:
    if state.phase == "finished" or state.phase not in ENDED:
        return state, []
    tasks = tuple(replace(t, code=None, progress_at_death=None, failures_in_a_row=0) for t in state.tasks)
    state = replace(
        state, phase="pending", exit_code=None, reason="", failures=0, failure_progress=None,
        evaluator_failures=0, bug=None, tasks=tasks,
    )  # fmt: skip
    return state, []


def _handle_task_exit(state: JobState, event: TaskExitedEvent, now: float) -> Result:
    before = state.task(event.task)
    if not before.alive or event.incarnation not in (None, before.incarnation):
        return state, []
    ended = replace(before, alive=False, code=event.code, failure=event.failure)
    after = replace(ended, escalate_at=None, move_to=None)
    state = state.with_progress(event.progress).with_task(after)
    lost = (*state.lost_nodes, *(node for node in event.lost if node not in state.lost_nodes))
    state = replace(state, died=(*state.died, event.task), lost_nodes=lost)
    actions: list[Action] = []
    if event.code != 0 and not before.signal_sent:
        actions.append(Log(describe_exit(after, brief=True)))
    if event.task.role == "evaluator" and (state.phase == "running" or state.goal == "finish"):
        given_up = event.code == 0 or (before.signal_sent and state.goal == "finish")
        state, more = (state, []) if given_up else retry_evaluator(state, after, now)
        actions += more
    elif _is_training_over(state) and (state.phase == "running" or state.goal == "finish"):
        state, notices = finish_training(state) if state.phase == "running" else (state, [])
        state, more = _release_surplus_tasks(state, event.reporting, now)
        actions += [*notices, *more]
    elif state.phase == "running":
        if before.move_to is not None and event.code != 0:
            done = moves.finish_move(state, after, before.move_to, event, now)
        else:
            done = recovery.handle_task_exit(state, after, event, now)
        if done is None:
            missing = recovery.find_stranded_members(state, event) if event.code == 0 else ()
            if missing:
                text = f"{_join(missing)} had not come back when {event.task} ended"
                state = replace(state, stop_cause=Cause(text, 1))
            state, more = _terminate_all(
                recovery.cancel_launches(replace(state, phase="stopping", goal="decide")), now
            )
        else:
            state, more = done
        actions += more
    return _conclude_if_stopped(state, actions, now)


def _is_training_over(state: JobState) -> bool:
    chief = [t for t in state.tasks if t.task.role == "chief"]
    needed = chief or state.members
    return all(not t.alive and t.code == 0 for t in needed)


def _release_surplus_tasks(state: JobState, reporting: Sequence[TaskId], now: float) -> Result:
    """Stop the tasks that training no longer needs, in the order given at the top."""
    actions: list[Action] = []
    workers_left = any(t.task.role == "worker" for t in state.alive)
    for task in state.alive:
        if task.signal_sent or task.escalate_at is not None:
            continue
        if task.task.role == "worker" and not task.member:
            state, more = _escalate(state, task, now)
            actions += more
        elif task.task.role == "worker" and task.task not in reporting:
            state = state.with_task(replace(task, escalate_at=now + WORKER_GRACE))
        elif task.task.role == "evaluator" and not workers_left:
            state = bound_evaluation(state, task.task, now)
        elif task.task.role == "ps" and not workers_left:
            state, more = _escalate(state, task, now)
            actions += more
    return state, actions


def _handle_launch_failure(state: JobState, event: LaunchFailedEvent, now: float) -> Result:
    for name in event.tasks:
        state = state.with_task(
            replace(state.task(name), alive=False, code=None, escalate_at=None, move_to=None)
        )
    lost = (*state.lost_nodes, *(node for node in event.lost if node not in state.lost_nodes))
    state = replace(state, lost_nodes=lost)
    actions: list[Action] = [Log(f"{_join(event.tasks)} could not be started: {event.message}")]
    if state.phase == "running" or state.goal == "finish":
        for name in (name for name in event.tasks if name.role == "evaluator"):
            state, more = retry_evaluator(state, state.task(name), now)
            actions += more
    if state.phase != "running":
        return _conclude_if_stopped(state, actions, now)
    event = replace(event, tasks=tuple(name for name in event.tasks if name.role != "evaluator"))
    if not event.tasks:
        return state, actions
    done = recovery.handle_launch_failure(state, event, now)
    if done is None:
        cause = Cause(f"{event.tasks[0]} could not be started: {event.message}", 1, event.tasks[0])
        done = _fail_attempt(state, cause, now)
    return done[0], [*actions, *done[1]]


def _join(tasks: Sequence[TaskId]) -> str:
    return ", ".join(map(str, tasks))


def _fail_attempt(state: JobState, cause: Cause, now: float) -> Result:
    """Stop all tasks because of `cause`, which no task's end shows."""
    stopping = recovery.cancel_launches(replace(state, phase="stopping", goal="decide", stop_cause=cause))
    state, actions = _terminate_all(stopping, now)
    return _conclude_if_stopped(state, actions, now)


def _handle_stall(state: JobState, event: StalledEvent, now: float) -> Result:
    if state.phase not in ("running", "stopping") or state.stop_cause:
        return state, []
    if any(t.signal_sent or t.stall_reason for t in state.alive):
        return state, []
    state = state.with_progress(event.progress)
    actions: list[Action] = [Log(f"{event.text}; every task's stacks are in its log")]
    actions += [Signal(t.task, "dump") for t in state.alive]
    if recovery.can_kill_stuck(state, event):
        for name in event.culprits:
            task = replace(state.task(name), escalate_at=now + DUMP_GRACE, stall_reason=event.text)
            state = state.with_task(task)
        return state, actions
    goal: Goal = "finish" if state.goal == "finish" else "decide"
    state, more = _dump_and_stop(state, Cause(event.text, STALL_CODE), goal, now)
    return state, actions + more


def _dump_and_stop(state: JobState, cause: Cause, goal: Goal, now: float) -> Result:
    """Stop all tasks because of `cause`, once they have had time to write their stacks."""
    state = recovery.cancel_launches(replace(state, phase="stopping", goal=goal, stop_cause=cause))
    for task in state.alive:
        state = state.with_task(replace(task, escalate_at=now + DUMP_GRACE))
    return _conclude_if_stopped(state, [], now)


def _handle_left_alone(state: JobState, event: LeftAloneEvent, now: float) -> Result:
    """End the training after worker 0, in a job with ps tasks: there it is the chief of the others, as
    TensorFlow has it. Elsewhere all workers train alike, so one that isn't done has failed. It would wait in
    the same place again."""
    if state.phase != "running":
        return state, []
    names = _join(event.tasks)
    text = f"{names} neither printed nor computed for {event.seconds:g} s after worker:0 had ended"
    if not any(t.task.role == "ps" for t in state.alive):
        text = f"{text}: it waits for what no task will send, so it is not tried again"
        actions: list[Action] = [Log(f"{text}; every task's stacks are in its log")]
        actions += [Signal(t.task, "dump") for t in state.alive]
        state, more = _dump_and_stop(
            state.with_progress(event.progress), Cause(text, STALL_CODE), "fail", now
        )
        return state, actions + more
    state, notices = finish_training(state.with_progress(event.progress))
    actions = [Log(f"{text}, which ends the training; stopping the tasks that are left"), *notices]
    for task in state.alive:
        if task.task.role == "evaluator":
            state = bound_evaluation(state, task.task, now)
        elif not task.signal_sent:
            state, more = _escalate(state, task, now)
            actions += more
    return _conclude_if_stopped(state, actions, now)


def _handle_stop_request(state: JobState, now: float) -> Result:
    if state.goal == "stop":
        actions: list[Action] = []
        for task in state.alive:
            if task.signal_sent != "kill":
                state = state.with_task(replace(task, signal_sent="kill", escalate_at=None))
                actions.append(Signal(task.task, "kill"))
        return state, actions
    if state.goal == "finish":
        state, actions = _terminate_all(recovery.cancel_launches(state), now)
        return _conclude_if_stopped(state, actions, now)
    stopping = replace(state, phase="stopping", goal="stop", restart_at=None)
    state, actions = _terminate_all(recovery.cancel_launches(stopping), now)
    return _conclude_if_stopped(state, [Log("stop was asked for; stopping every task"), *actions], now)


def _handle_controller_loss(state: JobState, event: ControllerLostEvent, now: float) -> Result:
    text = event.reason or (
        "the job's processes were all ended from outside, its controller included; `insitu resume` has it "
        "continue"
    )
    tasks = tuple(
        replace(t, alive=False, escalate_at=None, launch_at=None, move_to=None) for t in state.tasks
    )
    state = replace(state, tasks=tasks)
    return _end_job(state, "failed", 1, text, Cause(text, 1), now)


def _handle_tick(state: JobState, now: float) -> Result:
    if state.restart_at is not None and now >= state.restart_at:
        return _launch_all(state, now)
    actions: list[Action] = []
    for task in state.alive:
        if task.escalate_at is not None and now >= task.escalate_at:
            state, more = _escalate(state, task, now)
            actions += more
    due = [t.task for t in state.tasks if t.launch_at is not None and now >= t.launch_at]
    if due:
        state, more = recovery.relaunch(state, due, now)
        actions += more
        for name in due:
            state = bound_evaluation(state, name, now)
    return state, actions


def _terminate_all(state: JobState, now: float) -> Result:
    actions: list[Action] = []
    for task in state.alive:
        if not task.signal_sent:
            state, more = _escalate(state, task, now)
            actions += more
    return state, actions


def _escalate(state: JobState, task: TaskState, now: float) -> Result:
    """Send SIGTERM to a task, or SIGKILL if that has been sent."""
    if task.stall_reason:
        # It has had its time to write its stacks, and others wait for its place.
        return state.with_task(replace(task, signal_sent="kill", escalate_at=None)), [
            Signal(task.task, "kill")
        ]
    if task.signal_sent == "":
        terminated = replace(task, signal_sent="term", escalate_at=now + TERM_GRACE)
        return state.with_task(terminated), [Signal(task.task, "term")]
    killed = replace(task, signal_sent="kill", escalate_at=None)
    return state.with_task(killed), [
        Log(f"{task.task} did not end within {TERM_GRACE:g} s of SIGTERM; killing it"),
        Signal(task.task, "kill"),
    ]


def _conclude_if_stopped(state: JobState, actions: list[Action], now: float) -> Result:
    """Do what `goal` asks for once nothing of a stopping job runs."""
    if state.phase != "stopping" or state.alive or (state.goal == "finish" and is_evaluating(state)):
        return state, actions
    if state.goal == "finish":
        state, more = _end_job(state, "finished", 0, "", None, now)
    elif state.goal == "stop":
        state, more = _end_job(state, "stopped", STOPPED_CODE, "stopped as asked", None, now)
    elif state.goal == "fail":
        cause = find_cause(state)
        state, more = _end_job(state, "failed", cause.code, cause.text, cause, now)
    else:
        state, more = _restart_or_give_up(state, now)
    return state, actions + more


def _restart_or_give_up(state: JobState, now: float) -> Result:
    """Restart all tasks after a pause, or end the job as failed."""
    cause = find_cause(state)
    progress = state.attempts[-1].progress or (-1, -1)
    started = state.task(cause.task).started if cause.task else now
    failure = state.task(cause.task).failure if cause.task else None
    if restart_budget.is_in_vain(state, failure):
        text = f"{cause.text}; it would end the same way again, so it is not tried again"
        return _end_job(state, "failed", cause.code, text, cause, now)
    if recovery.is_same_bug(state, cause.fingerprint, started, progress):
        same = "exit" if failure and failure.type == SYSTEM_EXIT else "traceback"
        text = f"{cause.text}; the same {same} twice without progress in between, so it is not tried again"
        return _end_job(state, "failed", cause.code, text, cause, now)
    state = restart_budget.forget_outlived(state, progress, now)
    if state.failures >= state.max_restarts:
        text = f"{cause.text}; {state.failures} of {state.max_restarts} restarts were used"
        return _end_job(state, "failed", cause.code, text, cause, now)
    pause = min(recovery.MAX_RESTART_DELAY, 2.0 ** restart_budget.count_fruitless_attempts(state))
    bug = Bug(cause.fingerprint, progress, now) if cause.fingerprint else state.bug
    state = _close_attempt(restart_budget.count_failure(replace(state, bug=bug), progress, now), cause, now)
    state = replace(state, phase="restarting", goal="", stop_cause=None, restart_at=now + pause)
    return state, [
        Log(f"{cause.text}; restarting every task in {pause:g} s ({state.failures} of {state.max_restarts})")
    ]


def _end_job(
    state: JobState, phase: Phase, code: int, reason: str, cause: Cause | None, now: float
) -> Result:
    state = _close_attempt(state, cause, now)
    state = replace(state, phase=phase, goal="", restart_at=None, exit_code=code, reason=reason)
    text = f"job {phase}{f' with exit code {code}: {reason}' if phase == 'failed' else ''}"
    return state, [Log(text), Finish(code)]


def _close_attempt(state: JobState, cause: Cause | None, now: float) -> JobState:
    if not state.attempts or state.attempts[-1].ended is not None:
        return state
    return replace(
        state, attempts=(*state.attempts[:-1], replace(state.attempts[-1], ended=now, cause=cause))
    )


# Decides about the evaluator, which trains nothing: its end never stops, restarts or fails a job.
#
# It has failures of its own, as many as `max_restarts`. The roster says when training is over. It has
# `JobState.evaluator_grace` seconds from then on to score the last checkpoint and end by itself; if it fails
# meanwhile it is launched again as before. The job ends with it


def finish_training(state: JobState) -> Result:
    """Return the state of a job whose training is over, and the roster that notifies the evaluator.

    No task is launched any more but an evaluator that was to be launched again: the last checkpoint is still
    to be scored.
    """
    tasks = tuple(t if t.task.role == "evaluator" else replace(t, launch_at=None) for t in state.tasks)
    state = replace(state, phase="stopping", goal="finish", tasks=tasks)
    if not is_evaluating(state):
        return state, []
    state = replace(state, generation=state.generation + 1)
    return state, [Publish(state.generation)]


def is_evaluating(state: JobState) -> bool:
    """Return whether the evaluator runs, or is about to be launched again."""
    return any(t.task.role == "evaluator" and (t.alive or t.launch_at is not None) for t in state.tasks)


def retry_evaluator(state: JobState, task: TaskState, now: float) -> Result:
    """Schedule another launch of an evaluator that has failed, or give it up."""
    goes_on = "training continues" if state.phase == "running" else "training is over"
    if state.evaluator_failures >= state.max_restarts:
        tries = f"{state.evaluator_failures} of {state.max_restarts} restarts of its own were used"
        return state, [Log(f"{task.task} is not started again: {tries}; {goes_on}")]
    delay = 0.0
    if state.evaluator_failures:
        delay = min(recovery.MAX_RESTART_DELAY, 2.0 ** (state.evaluator_failures - 1))
    state = replace(state, evaluator_failures=state.evaluator_failures + 1)
    count = f"{state.evaluator_failures} of {state.max_restarts}"
    log = Log(f"starting {task.task} again in {delay:g} s ({count}); {goes_on}")
    if delay:
        return state.with_task(replace(task, launch_at=now + delay)), [log]
    state, actions = recovery.relaunch(state, [task.task], now)
    return bound_evaluation(state, task.task, now), [log, *actions]


def bound_evaluation(state: JobState, name: TaskId, now: float) -> JobState:
    """Return `state` with the evaluator's grace begun, if training is over and it runs."""
    task = state.task(name)
    if task.task.role != "evaluator" or state.goal != "finish" or not task.alive or task.signal_sent:
        return state
    return state.with_task(replace(task, escalate_at=now + state.evaluator_grace))
