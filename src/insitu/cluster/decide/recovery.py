"""What becomes of one task while the others go on: replaced, its shards adopted, joined, released. Pure.

Tasks that say that they are elastic (`insitu.progress`) keep the model's state when a peer dies, and wait for
a roster of a higher generation (`insitu.roster`). So a member that dies is

- **replaced**: its next life begins at once with the same shards, and a roster names it;
- or its shards are **adopted** by members on nodes that hold their partitions; its next life begins as a
  newcomer, which a further roster names once it is ready.

Where ps tasks hold the model (`JobState.served`) workers need nothing of each other: one that dies is always
replaced. A ps task that dies is begun anew at its address where another mirrors it.

Everything that needs all tasks to start again is told by None: a death while nobody can go on, the same
traceback twice without progress, and one failure more than allowed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from insitu.cluster.decide.job_state import (
    Action,
    Bug,
    Cause,
    JobState,
    Launch,
    LaunchFailed,
    PeersParted,
    Publish,
    Ready,
    Recovered,
    Recovery,
    Result,
    Say,
    ScaleRequested,
    Stalled,
    Steps,
    TaskExited,
    TaskState,
)
from insitu.cluster.decide.layout import contiguous, home_of, reassign
from insitu.spec import NodeId, TaskId

RELEASE_GRACE = 30.0
"""Seconds that a released task has to end by itself."""
LONGEST_PAUSE = 30.0
MOST_RECOVERIES = 50
"""As many as a job's state remembers; the journal's events have them all."""
_NOWHERE: Steps = (-1, -1)


def next_life(task: TaskState, now: float) -> TaskState:
    return replace(
        task,
        attempt=task.attempt + 1,
        alive=True,
        code=None,
        asked="",
        escalate_at=None,
        launch_at=None,
        failure=None,
        stalled="",
        started=now,
    )


def without_launches(state: JobState) -> JobState:
    return replace(state, tasks=tuple(replace(t, launch_at=None) for t in state.tasks))


def is_same_bug(state: JobState, fingerprint: str, started: float, progress: Steps) -> bool:
    """Whether a life begun at `started` ended of the job's last traceback and the job came no further."""
    bug = state.bug
    return bool(
        bug
        and fingerprint
        and bug.fingerprint == fingerprint
        and started >= bug.at
        and progress <= bug.progress
    )


# A task has ended.


def task_ended(state: JobState, task: TaskState, event: TaskExited, now: float) -> Result | None:
    """`task` has ended while the job runs on."""
    if task.released:
        wanted = task.task.index < state.wanted
        return (
            begin(state.with_task(replace(task, released=False)), [task.task], now) if wanted else (state, [])
        )
    if task.code == 0:
        return None if task.member and missing(state, event) else (state, [])
    if not _can_go_on(state, task, event):
        return None
    progress = event.progress or _NOWHERE
    fingerprint = task.failure.fingerprint if task.failure and not task.failure.peer_lost else ""
    if is_same_bug(state, fingerprint, task.started, progress) or state.failures >= state.max_restarts:
        return None
    bug = Bug(fingerprint, progress, now) if fingerprint else state.bug
    state = replace(state, failures=state.failures + 1, bug=bug)
    stuck = task.died_at is not None and progress <= task.died_at
    streak = task.streak + 1 if stuck else 0
    task = replace(task, node=_node_for(state, task), died_at=progress, streak=streak)
    pause = 0.0 if streak == 0 else min(LONGEST_PAUSE, 2.0 ** (streak - 1))
    state = state.with_task(replace(task, launch_at=now + pause))
    return _recover(state, task, event.progress, now, adopting=state.on_loss == "adopt")


def missing(state: JobState, event: TaskExited) -> tuple[TaskId, ...]:
    """Members that need one that has ended well: to go on with, or for its state."""
    if state.served:
        return ()
    return tuple(
        t.task
        for t in state.members
        if t.launch_at is not None
        or t.task in event.recovering
        or (t.alive and t.replacement and t.task not in event.elastic)
    )


def _can_go_on(state: JobState, lost: TaskState, event: TaskExited) -> bool:
    if lost.task.role == "evaluator":
        return True
    if lost.task.role == "worker" and not lost.member:
        return True
    if state.on_loss == "restart":
        return False
    if lost.task.role == "ps" and not _is_mirrored(state, lost):
        return False
    if not state.served and any(not t.alive and t.code == 0 for t in state.members):
        return False
    return _all_elastic(state, event.elastic)


def _is_mirrored(state: JobState, lost: TaskState) -> bool:
    """Whether another ps task has what `lost` held."""
    others = [t for t in state.tasks if t.task.role == "ps" and t.task != lost.task]
    return state.mirrored and all(t.alive for t in others)


def _all_elastic(state: JobState, elastic: Sequence[TaskId]) -> bool:
    """Whether all that train can go on without a peer, some of them holding the state of the training."""
    training = [t for t in state.alive if t.task.role in ("chief", "worker") and t.member and not t.released]
    return any(t.task in elastic for t in training) and all(
        t.replacement or t.task in elastic for t in training
    )


def _node_for(state: JobState, task: TaskState) -> NodeId | None:
    """Where its next life is to be: where it was, unless that node has lost its store."""
    if task.node not in state.lost:
        return task.node
    return home_of(task.shards, state.holders, state.lost) or task.node


def _recover(
    state: JobState, task: TaskState, progress: Steps | None, now: float, *, adopting: bool
) -> Result:
    """`task` is dead and its `launch_at` set: a roster for the others, and its next life when that is due."""
    actions: list[Action] = []
    is_member = task.task.role == "worker" and task.member
    why = task.stalled or describe_exit(task)
    if is_member and adopting and _adopters(state):
        state, actions = _adopt(state, why, progress, now)
    elif task.task.role == "ps":
        actions = [
            Say(f"replacing {task.task} ({state.failures} of {state.max_restarts}); its mirror answers")
        ]
    elif is_member:
        state = _note(state, Recovery("replaced", (task.task,), why, now, state.generation + 1, progress))
        meanwhile = "go on" if state.served else "wait"
        text = f"replacing {task.task} ({state.failures} of {state.max_restarts}); the others {meanwhile}"
        actions = [Say(text)]
    if state.task(task.task).launch_at == now:
        state, more = begin(state, [task.task], now)
        actions += more
    return state, actions


def _note(state: JobState, recovery: Recovery) -> JobState:
    return replace(state, recoveries=(*state.recoveries, recovery)[-MOST_RECOVERIES:])


def _adopters(state: JobState) -> list[TaskState]:
    return [t for t in state.members if t.alive] if state.holders and not state.served else []


def _adopt(state: JobState, why: str, progress: Steps | None, now: float) -> Result:
    """The living members take over the shards of the dead ones, which are members no longer."""
    dead = [t for t in state.members if not t.alive]
    state = state.with_task(*(replace(t, member=False, shards=()) for t in dead))
    state, publish = _republish(state)
    names = tuple(t.task for t in dead)
    state = _note(state, Recovery("adopted", names, why, now, state.generation, progress))
    takers = ", ".join(f"{t.task} runs {_list(t.shards)}" for t in state.members)
    return state, [Say(f"shards of {', '.join(map(str, names))} are adopted: {takers}"), publish]


def _republish(state: JobState) -> tuple[JobState, Publish]:
    """A next roster, in which the present members share all shards."""
    if state.holders:
        members = state.members
        held = {t.task: t.shards for t in members}
        shares = reassign(held, {t.task: t.node for t in members}, state.holders)
        state = state.with_task(*(replace(t, shards=shares[t.task]) for t in members))
    state = replace(state, generation=state.generation + 1)
    return state, Publish(state.generation)


def _list(shards: Sequence[int]) -> str:
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"


def begin(state: JobState, names: Sequence[TaskId], now: float) -> Result:
    """The next lives of these tasks begin. Members are named by a new roster as soon as all of them live."""
    tasks = [replace(next_life(state.task(name), now), replacement=True) for name in names]
    state = state.with_task(*tasks)
    state = replace(state, died=tuple(t for t in state.died if t not in names))
    actions: list[Action] = []
    awaited = any(t.member and t.task.role != "evaluator" for t in tasks)
    if awaited and all(t.alive for t in state.members):
        state = replace(state, generation=state.generation + 1)
        actions.append(Publish(state.generation))
    return state, [*actions, Launch(tuple(names))]


def launch_failed(state: JobState, event: LaunchFailed, now: float) -> Result | None:
    """Next lives that could not begin: they are tried again later, and meanwhile their shards are adopted."""
    tasks = [state.task(name) for name in event.tasks]
    members = [t for t in tasks if t.member]
    if not all(t.replacement for t in tasks):
        return None
    if members and not (_adopters(state) and all(t.task.role == "worker" for t in members)):
        return None
    if members and not any(t.task in event.elastic for t in _adopters(state)):
        return None
    for task in tasks:
        pause = min(LONGEST_PAUSE, 2.0**task.streak)
        state = state.with_task(replace(task, streak=task.streak + 1, launch_at=now + pause))
    if not members:
        return state, []
    return _adopt(state, f"no replacement could be started: {event.message}", None, now)


# Membership changes without a death.


def ready(state: JobState, event: Ready, now: float) -> Result:
    """Newcomers join once they are ready, and take their part of the shards."""
    new = [
        t for t in state.alive if t.task in event.tasks and not t.member and not t.released and not t.asked
    ]
    if state.phase != "running" or not new or not all(t.alive for t in state.members):
        return state, []
    state = state.with_task(*(replace(t, member=True) for t in new))
    state, publish = _republish(state)
    names = tuple(t.task for t in new)
    text = f"{', '.join(map(str, names))} joined"
    state = _note(state, Recovery("joined", names, text, now, state.generation, event.progress))
    return state, [Say(text), publish]


def parted_cause(event: PeersParted) -> Cause:
    return Cause(f"{', '.join(map(str, event.tasks))} lost the connection to others", 1)


def peers_parted(state: JobState, event: PeersParted, now: float) -> Result | None:
    """All members meet again, by a roster that differs in its generation alone."""
    if state.phase != "running" or any(t.launch_at is not None for t in state.members):
        return state, []
    if not all(t.alive for t in state.members) or not _all_elastic(state, event.elastic):
        return None
    if state.on_loss == "restart" or state.failures >= state.max_restarts:
        return None
    why = parted_cause(event).text
    state = replace(state, failures=state.failures + 1, generation=state.generation + 1)
    state = _note(state, Recovery("reconnected", event.tasks, why, now, state.generation, event.progress))
    return state, [Say(f"{why}; all meet again"), Publish(state.generation)]


def recovered(state: JobState, event: Recovered, now: float) -> Result:
    begun = state.attempts[-1].started if state.attempts else 0.0
    open_ones = [r for r in state.recoveries if r.ended is None and r.at >= begun]
    done = [r for r in open_ones if r.generation <= event.generation]
    if not done:
        return state, []
    said: list[Action] = [Say(f"training goes on {now - r.at:.2f} s after {r.text}") for r in done[-1:]]
    changed = tuple(replace(r, ended=now) if r in done else r for r in state.recoveries)
    return replace(state, recoveries=changed), said


def can_kill_stuck(state: JobState, event: Stalled) -> bool:
    """Whether it is enough to kill those that stand still, since all others can go on without them."""
    culprits = set(event.culprits)
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


def scale(state: JobState, event: ScaleRequested, now: float) -> Result:
    refused = _refuse_to_scale(state, event)
    if refused:
        return state, [Say(f"not scaled to {event.workers} workers: {refused}")]
    before = state.wanted
    state = replace(state, wanted=event.workers)
    said: list[Action] = [Say(f"scaling from {before} to {event.workers} workers")]
    state, shrunk = _shrink(state, event, now)
    state, grown = _grow(state, now)
    return state, [*said, *shrunk, *grown]


def _refuse_to_scale(state: JobState, event: ScaleRequested) -> str:
    if state.phase != "running":
        return f"the job is {state.phase}"
    if state.served:
        return "its ps tasks count on the workers that it began with"
    if not 1 <= event.workers <= len(state.holders):
        return f"it has {len(state.holders)} shards, so it takes 1 to {len(state.holders)} workers"
    if not all(t.alive for t in state.members) or not _all_elastic(state, event.elastic):
        rigid = [str(t.task) for t in state.members if t.task not in event.elastic]
        return f"{', '.join(rigid)} can't take part in it: only tasks that train together may come and go"
    if not any(t.task.index < event.workers and t.task in event.elastic for t in state.members):
        return "none of those that would stay has the state of the training yet; ask again once one has"
    return ""


def _shrink(state: JobState, event: ScaleRequested, now: float) -> Result:
    surplus = [
        t for t in state.tasks
        if t.task.role == "worker" and t.task.index >= state.wanted and not t.released
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
                escalate_at=grace if task.alive and not task.asked else task.escalate_at,
            )
        )  # fmt: skip
    if members:
        state, publish = _republish(state)
        text = f"{', '.join(map(str, members))} released"
        state = _note(state, Recovery("released", members, text, now, state.generation, event.progress))
        actions.append(publish)
    return state, actions


def _grow(state: JobState, now: float) -> Result:
    """Tasks for the indices that nobody has; one that is still ending is begun anew when it has ended."""
    known = {t.task for t in state.tasks}
    layout = contiguous(state.wanted, len(state.holders))
    names = []
    for index in range(state.wanted):
        name = TaskId("worker", index)
        if name not in known:
            node = home_of(layout[index], state.holders, state.lost) or state.tasks[0].node
            state = replace(state, tasks=_in_order((*state.tasks, TaskState(name, node, member=False))))
            names.append(name)
        elif state.task(name).released and not state.task(name).alive:
            state = state.with_task(replace(state.task(name), released=False))
            names.append(name)
    return begin(state, names, now) if names else (state, [])


def _in_order(tasks: Sequence[TaskState]) -> tuple[TaskState, ...]:
    order = ("chief", "worker", "ps", "evaluator")
    return tuple(sorted(tasks, key=lambda t: (order.index(t.task.role), t.task.index)))


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
