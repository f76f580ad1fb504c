"""Sends all tasks what the chief alone knows: what its callbacks remember, and what they have restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.train.collectives import all_gather_json, barrier_token, broadcast_value
from insitu.train.elastic import BEGIN, END, EPOCH, PREDICT, TEST, TRAIN, LoopPosition, Membership
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.replica import load_snapshot, read_state, views


class ChiefMemory:
    """Sends all tasks what the chief's callbacks remember, wherever they may have been called.

    So the task in the chief's place calls them again with what they remembered the first time. Between the
    batches of an epoch these are only the ones that receive batches.
    """

    def __init__(self, memory: CallbackMemory) -> None:
        self._memory = memory
        #: Whether callbacks that don't receive batches may have been called since the last time. The same in
        #: all tasks, as `_hears` is. Written by the list of callbacks, and at the end of a unit.
        self.all_due = True
        #: Whether some of the chief's callbacks receive batches. Sent by it.
        self._hears = False

    def is_due(self, position: LoopPosition) -> bool:
        """Return whether callbacks may have been called since the last unit. The same in all tasks."""
        return self._sends_all(position) or (self._hears and position.kind in (TRAIN, TEST, PREDICT))

    def _sends_all(self, position: LoopPosition) -> bool:
        return self.all_due or position.kind in (BEGIN, EPOCH, END)

    def share(self, group: Group, chief: int | None, position: LoopPosition, hearing: Sequence[Any]) -> None:
        """Send what may have changed since the last unit. `hearing` are the callbacks that receive batches.
        Collective."""
        if chief is None or group.size == 1:
            return
        everything = self._sends_all(position)
        is_chief = group.rank == chief
        payload = None
        if is_chief:
            states = self._memory.chief_state_dict(None if everything else hearing)
            payload = {"hears": bool(hearing), "states": states}
        received = broadcast_value(group, chief, payload)
        self._hears = received["hears"]
        missing = [] if is_chief else self._memory.take_sent(received["states"])
        if not any(self._memory.is_hash(state) for state in received["states"].values()):
            return
        names = list(received["states"])
        lists = all_gather_json(group, [names.index(name) for name in missing])
        lacking = sorted({names[index] for indices in lists for index in indices})
        if not lacking:
            return
        self._memory.send_from_now_on(lacking)
        states = self._memory.chief_state_dict() if is_chief else {}
        more = broadcast_value(group, chief, {n: states[n] for n in lacking} if is_chief else None)
        if not is_chief:
            self._memory.take_sent(more)

    def end_unit(self) -> None:
        """Hear that a unit was done in which `share` was called."""
        self.all_due = False

    def state_dict(self) -> list[bool]:
        """Return what another task needs to send and receive as this one."""
        return [self.all_due, self._hears]

    def load_state_dict(self, state: list[bool]) -> None:
        """Load another task's `state_dict()`."""
        self.all_due, self._hears = state


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
