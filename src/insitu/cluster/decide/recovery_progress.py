"""Finds out from the tasks' records how a recovery goes. Pure: state and records are passed in."""

from __future__ import annotations

from collections.abc import Mapping

from insitu.base.progress import LEAVING, RESTING, Progress
from insitu.base.roster import CONNECTING, JOINING, RECOVERING
from insitu.base.spec import TaskId
from insitu.cluster.decide.job_state import (
    EpochStep,
    JobState,
)

Records = Mapping[TaskId, Progress | None]


def find_furthest(records: Records) -> EpochStep | None:
    """Return the furthest (epoch, step) that any task has reported, or None."""
    return max(((r.epoch, r.step) for r in records.values() if r is not None), default=None)


def find_ready_to_join(state: JobState, records: Records) -> tuple[TaskId, ...]:
    """Return the newcomers that wait for a roster that names them."""
    if state.phase != "running":
        return ()
    waiting = [t.task for t in state.alive if t.task.role == "worker" and not t.member and not t.released]
    return tuple(t for t in waiting if (r := records.get(t)) and r.place == JOINING)


def has_recovered(state: JobState, records: Records) -> bool:
    """Return whether each member has completed its training, or a step since membership last changed."""
    after = max((r.steps or (-1, -1) for r in state.recoveries if r.ended is None), default=(-1, -1))
    for task in state.members:
        record = records.get(task.task)
        if not task.alive:
            if task.code != 0:
                return False
            continue
        if record is None or record.generation < state.generation:
            return False
        if (record.epoch, record.step) <= after and record.place not in RESTING:
            return False
    return True


def find_disconnected(state: JobState, records: Records) -> tuple[TaskId, ...]:
    """Return the members that report that they have lost a peer of the newest generation."""
    moving = any(t.launch_at is not None or t.move_to is not None for t in state.members)
    if state.phase != "running" or moving:
        return ()
    if any(t.alive and (r := records.get(t.task)) and r.place == LEAVING for t in state.members):
        return ()  # its end, which comes soon, says why the others have lost it
    return tuple(
        t.task
        for t in state.members
        if t.alive
        and (r := records.get(t.task))
        and r.place == RECOVERING
        and r.generation == state.generation
    )


def find_waiting_for_ended(state: JobState, records: Records) -> tuple[TaskId, ...]:
    """Return the members that wait for others, some of which never come: their scripts have ended well."""
    if state.phase != "running" or not any(t.has_ended_well for t in state.members):
        return ()
    return tuple(
        t.task
        for t in state.members
        if t.alive and (r := records.get(t.task)) and r.place in (RECOVERING, CONNECTING)
    )
