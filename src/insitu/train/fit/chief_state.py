"""Sends all tasks what callbacks know that only the chief runs."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.train.collectives import barrier_token, broadcast_value
from insitu.train.elastic import LoopPosition, Membership
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.replica import load_snapshot, read_state, views


def send_writers(membership: Membership, position: LoopPosition, memory: CallbackMemory) -> None:
    """Send all tasks what the chief's writers remember: another chief can go on from there."""
    if membership.context.job is None or not memory.has_writers:
        return

    def send(group: Group) -> NDArray[Any]:
        chief = membership.chief_rank(group)
        if chief is not None:
            own = memory.writers_state_dict() if chief == group.rank else None
            memory.writers = broadcast_value(group, chief, own)
        return barrier_token(group)

    membership.lockstep.run_unit_until_done(position, send)


def send_restored(membership: Membership, position: LoopPosition, model: Any) -> None:
    """Send all tasks the state that a callback of the chief's has read from its disk, and the epoch to begin
    with."""
    if len(membership.context.workers) <= 1:
        return

    def send(group: Group) -> NDArray[Any]:
        chief = membership.chief_rank(group)
        if chief is not None:
            state = read_state(model)
            own = {"values": views(state), "epoch": model._initial_epoch or 0}
            received = broadcast_value(group, chief, own if chief == group.rank else None)
            if chief != group.rank:
                load_snapshot(state, received["values"])
                model._initial_epoch = int(received["epoch"]) or None
        return barrier_token(group)

    membership.lockstep.run_unit_until_done(position, send)
