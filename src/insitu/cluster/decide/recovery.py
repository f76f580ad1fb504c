"""Replaces one task while the others continue, lets others adopt its shards, adds and releases tasks. Pure.

Tasks that report that they are elastic (`base/progress.py`) keep the model's state when a peer dies, and wait
for a roster of a higher generation (`base/roster.py`). So a member that dies is

- **replaced**: its next incarnation is launched at once with the same shards, and a roster names it;
- or its shards are **adopted** by members on nodes that hold their partitions; its next incarnation is a
  newcomer, which a further roster names once it is ready. The chief's never are: its callbacks write what
  the job leaves behind, so that the others wait for the next one.

If ps tasks hold the model (`JobState.has_servers`) workers need nothing of each other: one that dies is
always replaced. A ps task that dies is launched again at its address if another mirrors it.

A function returns None if all tasks must start again: a death while no task can continue, the same traceback
or exit twice without progress, a failure that another attempt would have too, one failure more than allowed,
and connections that are lost again and again without a step in between.

A member whose script ends well isn't lost. Those that wait for it later, since only they make a call such as
`evaluate`, continue without it and run its shards.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from dataclasses import replace

from insitu.base.spec import NodeId, TaskId
from insitu.cluster.decide.events import (
    Action,
    Launch,
    LaunchFailedEvent,
    Log,
    PeersLostEvent,
    Publish,
    ReadyEvent,
    RecoveredEvent,
    Reply,
    Result,
    ScaleRequestedEvent,
    StalledEvent,
    TaskExitedEvent,
)
from insitu.cluster.decide.job_state import (
    Bug,
    Cause,
    EpochStep,
    JobState,
    Recovery,
    TaskState,
)
from insitu.cluster.decide.layout import assign_contiguous_shards, choose_node, reassign
from insitu.cluster.decide.restart_budget import (
    MAX_FRUITLESS_RECONNECTIONS,
    count_failure,
    count_fruitless_reconnections,
    forget_outlived,
    is_in_vain,
)

RELEASE_GRACE = 30.0
"""Seconds that a released task has to end by itself."""
MAX_RESTART_DELAY = 30.0
MAX_RECOVERIES = 50
"""Recoveries that a job's state keeps; the journal's events have them all."""
_BEFORE_TRAINING: EpochStep = (-1, -1)


def begin_incarnation(task: TaskState, now: float) -> TaskState:
    """Return `task` with its next incarnation launched."""
    return replace(
        task,
        incarnation=task.incarnation + 1,
        alive=True,
        code=None,
        signal_sent="",
        escalate_at=None,
        launch_at=None,
        move_to=None,
        failure=None,
        stall_reason="",
        started=now,
    )


def cancel_launches(state: JobState) -> JobState:
    """Return `state` without the launches of single tasks that are due."""
    return replace(state, tasks=tuple(replace(t, launch_at=None) for t in state.tasks))


def is_same_bug(state: JobState, fingerprint: str, started: float, progress: EpochStep) -> bool:
    """Return whether an incarnation launched at `started` failed as the job's last bug did, without progress
    since."""
    bug = state.bug
    return bool(
        bug
        and fingerprint
        and bug.fingerprint == fingerprint
        and started >= bug.at
        and progress <= bug.progress
    )


# A task has ended.


def handle_task_exit(state: JobState, task: TaskState, event: TaskExitedEvent, now: float) -> Result | None:
    """Handle the end of `task` in a job that runs on. Returns None if all tasks must start again."""
    if task.released:
        wanted = task.task.index < state.target_workers
        return (
            relaunch(state.with_task(replace(task, released=False)), [task.task], now)
            if wanted
            else (state, [])
        )
    if task.code == 0:
        return _handle_good_end(state, task, event)
    if is_in_vain(state, task.failure):
        return None
    if not can_go_on(state, task, event):
        return None
    progress = event.progress or _BEFORE_TRAINING
    fingerprint = task.failure.fingerprint if task.failure and not task.failure.peer_lost else ""
    state = forget_outlived(state, progress, now)
    if is_same_bug(state, fingerprint, task.started, progress) or state.failures >= state.max_restarts:
        return None
    bug = Bug(fingerprint, progress, now) if fingerprint else state.bug
    state = replace(count_failure(state, progress, now), bug=bug)
    stuck = task.progress_at_death is not None and progress <= task.progress_at_death
    failures_in_a_row = task.failures_in_a_row + 1 if stuck else 0
    task = replace(
        task,
        node=choose_next_node(state, task),
        progress_at_death=progress,
        failures_in_a_row=failures_in_a_row,
    )
    pause = 0.0 if failures_in_a_row == 0 else min(MAX_RESTART_DELAY, 2.0 ** (failures_in_a_row - 1))
    state = state.with_task(replace(task, launch_at=now + pause))
    return _relaunch_or_adopt(state, task, event.progress, now, adopting=state.on_loss == "adopt")


def _handle_good_end(state: JobState, task: TaskState, event: TaskExitedEvent) -> Result | None:
    """Handle the end of a script. Members that wait for it continue without it."""
    if not task.member:
        return state, []
    if find_stranded_members(state, event):
        return None
    waiting = any(t.task in event.recovering for t in state.members if t.alive)
    return go_on_without_ended(state) if waiting else (state, [])


def go_on_without_ended(state: JobState) -> Result | None:
    """Let the members do without those whose scripts have ended well: replicas are equal, so nothing of the
    training is lost with these. Returns None if nobody can take over their shards."""
    ended = [t for t in state.members if t.has_ended_well]
    if not state.holders or not any(t.alive for t in state.members):
        return None
    state = state.with_task(*(replace(t, member=False, shards=()) for t in ended))
    state, publish = _republish(state)
    takers = ", ".join(f"{t.task} runs {_format_shards(t.shards)}" for t in state.members)
    names = ", ".join(str(t.task) for t in ended)
    return state, [Log(f"{names} ended well; the others continue without: {takers}"), publish]


def find_stranded_members(state: JobState, event: TaskExitedEvent) -> tuple[TaskId, ...]:
    """Return the members that need the state of one that has ended well."""
    if state.has_servers:
        return ()
    return tuple(
        t.task
        for t in state.members
        if t.launch_at is not None or (t.alive and t.replacement and t.task not in event.elastic)
    )


def can_go_on(state: JobState, lost: TaskState, event: TaskExitedEvent) -> bool:
    """Return whether the others can continue without `lost` until it is back."""
    if lost.task.role == "worker" and not lost.member:
        return True
    if state.on_loss == "restart":
        return False
    if lost.task.role == "ps" and not _is_mirrored(state, lost):
        return False
    if not state.has_servers and any(not t.alive and t.code == 0 for t in state.members):
        return False
    return _all_elastic(state, event.elastic)


def _is_mirrored(state: JobState, lost: TaskState) -> bool:
    """Return whether another ps task has what `lost` held."""
    others = [t for t in state.tasks if t.task.role == "ps" and t.task != lost.task]
    return state.mirrored and all(t.alive for t in others)


def _all_elastic(state: JobState, elastic: Sequence[TaskId]) -> bool:
    """Return whether all that train can continue without a peer, and some hold the training's state."""
    training = [t for t in state.alive if t.task.role in ("chief", "worker") and t.member and not t.released]
    return any(t.task in elastic for t in training) and all(
        t.replacement or t.task in elastic for t in training
    )


def choose_next_node(state: JobState, task: TaskState) -> NodeId | None:
    """Return the node of its next incarnation: the same, unless that has lost its store or leaves."""
    if task.node not in state.closed_nodes:
        return task.node
    found = choose_node(task.shards, state.holders, state.closed_nodes)
    if found is None and not task.shards:
        # It reads no rows, and belongs beside the first worker, whose checkpoints it may read.
        known = [t.node for t in state.tasks], [node for nodes in state.holders for node in nodes]
        left = [node for node in itertools.chain(*known) if node and node not in state.closed_nodes]
        found = left[0] if left else None
    return found or task.node


def _relaunch_or_adopt(
    state: JobState, task: TaskState, progress: EpochStep | None, now: float, *, adopting: bool
) -> Result:
    """Launch `task`, dead with its `launch_at` set, once that is due; `adopting`: let others take its
    shards."""
    actions: list[Action] = []
    is_member = task.task.role == "worker" and task.member
    why = task.stall_reason or describe_exit(task)
    if is_member and adopting and can_adopt(state):
        state, actions = adopt(state, why, progress, now)
    elif task.task.role == "ps":
        actions = [
            Log(f"replacing {task.task} ({state.failures} of {state.max_restarts}); its mirror answers")
        ]
    elif is_member:
        state = record_recovery(
            state, Recovery("replaced", (task.task,), why, now, state.generation + 1, progress)
        )
        meanwhile = "continue" if state.has_servers else "wait"
        text = f"replacing {task.task} ({state.failures} of {state.max_restarts}); the others {meanwhile}"
        actions = [Log(text)]
    if state.task(task.task).launch_at == now:
        state, more = relaunch(state, [task.task], now)
        actions += more
    return state, actions


def record_recovery(state: JobState, recovery: Recovery) -> JobState:
    """Return `state` with one change of membership more."""
    return replace(state, recoveries=(*state.recoveries, recovery)[-MAX_RECOVERIES:])


def find_adopters(state: JobState) -> list[TaskState]:
    """Return the members that can run others' shards."""
    return [t for t in state.members if t.alive] if state.holders and not state.has_servers else []


def can_adopt(state: JobState) -> bool:
    """Return whether members can run the shards of those that are dead: of others than the chief."""
    dead = [t for t in state.members if not t.alive]
    return bool(find_adopters(state)) and not any(state.is_chief(t.task) for t in dead)


def adopt(state: JobState, why: str, progress: EpochStep | None, now: float) -> Result:
    """Give the shards of dead members, which are members no longer, to those alive."""
    dead = [t for t in state.members if not t.alive]
    state = state.with_task(*(replace(t, member=False, shards=()) for t in dead))
    state, publish = _republish(state)
    names = tuple(t.task for t in dead)
    state = record_recovery(state, Recovery("adopted", names, why, now, state.generation, progress))
    takers = ", ".join(f"{t.task} runs {_format_shards(t.shards)}" for t in state.members)
    return state, [Log(f"shards of {', '.join(map(str, names))} are adopted: {takers}"), publish]


def _republish(state: JobState) -> tuple[JobState, Publish]:
    """Return the next roster, in which the present members share all shards."""
    if state.holders:
        members = state.members
        held = {t.task: t.shards for t in members}
        shares = reassign(held, {t.task: t.node for t in members}, state.holders)
        state = state.with_task(*(replace(t, shards=shares[t.task]) for t in members))
    state = replace(state, generation=state.generation + 1)
    return state, Publish(state.generation)


def _format_shards(shards: Sequence[int]) -> str:
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"


def relaunch(state: JobState, names: Sequence[TaskId], now: float) -> Result:
    """Launch the next incarnations of these tasks, and name members in a new roster once all are alive."""
    tasks = [replace(begin_incarnation(state.task(name), now), replacement=True) for name in names]
    state = state.with_task(*tasks)
    state = replace(state, died=tuple(t for t in state.died if t not in names))
    actions: list[Action] = []
    awaited = any(t.member and t.task.role != "evaluator" for t in tasks)
    if awaited and all(t.alive for t in state.members):
        state = replace(state, generation=state.generation + 1)
        actions.append(Publish(state.generation))
    return state, [*actions, Launch(tuple(names))]


def handle_launch_failure(state: JobState, event: LaunchFailedEvent, now: float) -> Result | None:
    """Launch replacements that could not be launched again later; meanwhile others adopt their shards, but
    for the chief's."""
    tasks = [state.task(name) for name in event.tasks]
    members = [t for t in tasks if t.member]
    if not all(t.replacement for t in tasks):
        return None
    if members and not (find_adopters(state) and all(t.task.role == "worker" for t in members)):
        return None
    if members and not any(t.task in event.elastic for t in find_adopters(state)):
        return None
    if any(set(state.holders[shard]) <= set(state.lost_nodes) for t in members for shard in t.shards):
        return None  # nobody has its rows
    for task in tasks:
        pause = min(MAX_RESTART_DELAY, 2.0**task.failures_in_a_row)
        state = state.with_task(
            replace(
                task,
                node=choose_next_node(state, task),
                failures_in_a_row=task.failures_in_a_row + 1,
                launch_at=now + pause,
            )
        )
    if not members or not can_adopt(state):
        return state, []
    return adopt(state, f"no replacement could be started: {event.message}", None, now)


# Membership changes without a death.


def add_ready_tasks(state: JobState, event: ReadyEvent, now: float) -> Result:
    """Add newcomers that are ready, which take their part of the shards."""
    new = [
        t
        for t in state.alive
        if t.task in event.tasks and not t.member and not t.released and not t.signal_sent
    ]
    if state.phase != "running" or not new or not all(t.alive for t in state.members):
        return state, []
    state = state.with_task(*(replace(t, member=True) for t in new))
    state, publish = _republish(state)
    names = tuple(t.task for t in new)
    text = f"{', '.join(map(str, names))} joined"
    state = record_recovery(state, Recovery("joined", names, text, now, state.generation, event.progress))
    return state, [Log(text), publish]


def describe_lost_peers(event: PeersLostEvent) -> Cause:
    """Return the cause of an attempt that ends of lost connections."""
    return Cause(f"{', '.join(map(str, event.tasks))} lost the connection to others", 1)


def reconnect_peers(state: JobState, event: PeersLostEvent, now: float) -> Result | None:
    """Let all members rejoin, without those whose scripts have ended well.

    That is the network's failure, not the job's: it doesn't count, as long as training continues in between.
    """
    if state.phase != "running" or any(t.launch_at is not None for t in state.members):
        return state, []
    if any(t.has_ended_well for t in state.members):
        return go_on_without_ended(state)
    if not all(t.alive for t in state.members) or not _all_elastic(state, event.elastic):
        return None
    if state.on_loss == "restart":
        return None
    if count_fruitless_reconnections(state, event.progress) >= MAX_FRUITLESS_RECONNECTIONS:
        return None
    why = describe_lost_peers(event).text
    state = replace(state, generation=state.generation + 1)
    state = record_recovery(
        state, Recovery("reconnected", event.tasks, why, now, state.generation, event.progress)
    )
    return state, [Log(f"{why}; all meet again"), Publish(state.generation)]


def close_recoveries(state: JobState, event: RecoveredEvent, now: float) -> Result:
    """Mark recoveries as ended up to the generation in which every member has completed a step."""
    attempt_start = state.attempts[-1].started if state.attempts else 0.0
    open_ones = [r for r in state.recoveries if r.ended is None and r.at >= attempt_start]
    done = [r for r in open_ones if r.generation <= event.generation]
    if not done:
        return state, []
    logs: list[Action] = [Log(f"training continues {now - r.at:.2f} s after {r.text}") for r in done[-1:]]
    changed = tuple(replace(r, ended=now) if r in done else r for r in state.recoveries)
    return replace(state, recoveries=changed), logs


def can_kill_stuck(state: JobState, event: StalledEvent) -> bool:
    """Return whether killing those that stand still is enough, since all others can continue without them."""
    culprits = set(event.culprits)
    if culprits and all(name.role == "evaluator" for name in culprits):
        return state.phase == "running"
    training = [t for t in state.alive if t.task.role in ("chief", "worker") and t.member]
    others = [t for t in training if t.task not in culprits]
    return bool(
        state.phase == "running"
        and state.on_loss != "restart"
        and culprits
        and any(t.task in event.elastic for t in others)
        and all(t.replacement or t.task in event.elastic for t in others)
    )


# Growing and shrinking by hand.


def scale(state: JobState, event: ScaleRequestedEvent, now: float) -> Result:
    """Change the number of workers, or log why that is refused."""
    refused = _refuse_to_scale(state, event)
    if refused:
        text = f"not scaled to {event.workers} workers: {refused}"
        return state, [Log(text), *reply(event.token, text, refused=True)]
    before = state.target_workers
    state = replace(state, target_workers=event.workers)
    text = f"scaling from {before} to {event.workers} workers"
    state, shrunk = _shrink(state, event, now)
    state, grown = _grow(state, now)
    return state, [Log(text), *reply(event.token, text), *shrunk, *grown]


def reply(token: str, text: str, *, refused: bool = False) -> list[Action]:
    """Return the reply to the request `token`, or nothing if nobody awaits one."""
    return [Reply(token, text, refused)] if token else []


def _refuse_to_scale(state: JobState, event: ScaleRequestedEvent) -> str:
    if state.phase != "running":
        return f"the job is {state.phase}"
    if state.has_servers:
        return "its ps tasks count on the workers that it began with"
    if not 1 <= event.workers <= len(state.holders):
        return f"it has {len(state.holders)} shards, so it takes 1 to {len(state.holders)} workers"
    workers = [t for t in state.tasks if t.task.role == "worker" and not t.released]
    if ended := [str(t.task) for t in workers if t.has_ended_well]:
        return f"the scripts of {', '.join(ended)} have ended"
    if not all(t.alive for t in state.members) or not _all_elastic(state, event.elastic):
        rigid = [str(t.task) for t in state.members if t.task not in event.elastic]
        return f"{', '.join(rigid)} can't take part in it: only tasks that train together may come and go"
    if not any(t.task.index < event.workers and t.task in event.elastic for t in state.members):
        return "none of those that would stay has the state of the training yet; ask again once one has"
    return ""


def _shrink(state: JobState, event: ScaleRequestedEvent, now: float) -> Result:
    surplus = [
        t for t in state.tasks
        if t.task.role == "worker" and t.task.index >= state.target_workers and not t.released
    ]  # fmt: skip
    if not surplus:
        return state, []
    members = tuple(t.task for t in surplus if t.member)
    actions: list[Action] = []
    for task in surplus:
        grace = now + (RELEASE_GRACE if task.member else 0.0)
        state = state.with_task(
            replace(
                task, member=False, released=True, shards=(), launch_at=None,
                escalate_at=grace if task.alive and not task.signal_sent else task.escalate_at,
            )
        )  # fmt: skip
    if members:
        state, publish = _republish(state)
        text = f"{', '.join(map(str, members))} released"
        state = record_recovery(
            state, Recovery("released", members, text, now, state.generation, event.progress)
        )
        actions.append(publish)
    return state, actions


def _grow(state: JobState, now: float) -> Result:
    """Launch tasks for the indices that none has; one that is still ending is launched when it has ended."""
    known = {t.task for t in state.tasks}
    layout = assign_contiguous_shards(state.target_workers, len(state.holders))
    names = []
    for index in range(state.target_workers):
        name = TaskId("worker", index)
        if name not in known:
            node = choose_node(layout[index], state.holders, state.closed_nodes) or state.tasks[0].node
            state = replace(state, tasks=_sort_by_role((*state.tasks, TaskState(name, node, member=False))))
            names.append(name)
        elif state.task(name).released and not state.task(name).alive:
            state = state.with_task(replace(state.task(name), released=False))
            names.append(name)
    return relaunch(state, names, now) if names else (state, [])


def _sort_by_role(tasks: Sequence[TaskState]) -> tuple[TaskState, ...]:
    order = ("chief", "worker", "ps", "evaluator")
    return tuple(sorted(tasks, key=lambda t: (order.index(t.task.role), t.task.index)))


# Finds out why an attempt ended. Pure


def find_cause(state: JobState) -> Cause:
    """Return why the attempt ended: the task that failed, not those that failed because of it.

    A stall or a failed launch counts first. Then a failure that is final. Then tasks that ended before they
    were signalled, or by a signal that wasn't ours; those that only lost a peer come last; else the one that
    ended last.
    """
    if state.stop_cause:
        return state.stop_cause
    dead = [state.task(name) for name in state.died if name.role != "evaluator"]
    suspects = [
        task
        for task in dead
        if task.code
        and (
            not task.signal_sent
            or (task.failure and task.failure.final)
            or (task.code < 0 and not _ended_by_our_signal(task))
        )
    ]
    suspects.sort(key=lambda t: (not t.failure.final, t.failure.peer_lost) if t.failure else (True, False))
    guilty = suspects[0] if suspects else dead[-1]
    # Losing a peer is no bug of the script, however often it looks the same.
    fingerprint = guilty.failure.fingerprint if guilty.failure and not guilty.failure.peer_lost else ""
    alike = [t.task for t in state.tasks if t is not guilty and _is_alike(t, guilty)]
    return Cause(describe_exit(guilty, alike), to_exit_code(guilty.code or 0), guilty.task, fingerprint)


def _is_alike(task: TaskState, other: TaskState) -> bool:
    """Return whether both tasks ended by the same traceback or exit."""
    mine, its = task.failure, other.failure
    return bool(mine and its and its.fingerprint == mine.fingerprint and task.code == other.code)


def _ended_by_our_signal(task: TaskState) -> bool:
    sent = {"term": {signal.SIGTERM}, "kill": {signal.SIGTERM, signal.SIGKILL}, "": set()}[task.signal_sent]
    return -(task.code or 0) in sent


def to_exit_code(code: int) -> int:
    """Return an exit code as the shell has it: 128 + the signal's number for a task that a signal ended."""
    return 128 - code if code < 0 else code


def describe_exit(task: TaskState, alike: Sequence[TaskId] = (), *, brief: bool = False) -> str:
    """Return such as `worker:1 was killed by SIGKILL`.

    `alike` are tasks that ended in the same way. `brief` leaves out the message of an exception, as when the
    task's own output has it.
    """
    more = str(alike[0]) if len(alike) == 1 else f"{len(alike)} others"
    names = f"{task.task} and {more}" if alike else str(task.task)
    if task.code is None:
        return f"{task.task} did not run"
    if task.code < 0:
        return f"{task.task} was killed by {_name_signal(-task.code)}"
    why = [task.failure.type, "" if brief else _without_stop(task.failure.message)] if task.failure else []
    return ": ".join([f"{names} ended with exit code {task.code}", *filter(None, why)])


def _without_stop(message: str) -> str:
    """Return a message without the full stop at its end: the sentence continues behind it."""
    return message if message.endswith("..") else message.removesuffix(".")


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
