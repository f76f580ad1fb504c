"""Membership of a task that trains on servers: it depends on no other worker.

What keeps synchronous workers in step (units that all do together, places in a group) is switched off; the
group is joined where a script asks for it (`strategy.reduce`, `gather`).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.context import Context
from insitu.roster import RosterWatch
from insitu.train.elastic import Key, Lockstep, Membership, Session, Telling, Work

_GLANCE = 0.05
"""Seconds between two looks for a newer roster."""


class ServerMembership(Membership):
    """See `Membership`. The chief is worker 0."""

    shards_move = False

    def __init__(self, context: Context, transport: str = "auto") -> None:
        super().__init__(context, transport)
        self.session = _Alone()
        self.lockstep = _Unpaced(self._places, self.session)
        self.session.lockstep = self.lockstep
        self.telling: Independent = Independent(context)
        self.telling.open()
        self.telling.idle()

    @property
    def leads(self) -> bool:
        return self.context.is_chief


class Independent(Telling):
    """Says in which generation this task trains: always the newest, since others' deaths don't concern it
    until its script asks for a group."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watch = RosterWatch(context.job.roster) if context.job is not None else None
        self._glanced = -_GLANCE

    @property
    def elastic(self) -> bool:
        return not self._stiff

    def place(self, place: str) -> None:
        self._glance()
        super().place(place)

    def wait(self) -> None:
        """Called now and then while this task waits for others: says only what is new."""
        if self._glance():
            super().place(self._place)

    def _glance(self) -> bool:
        """Whether there is a newer generation."""
        now = time.monotonic()
        if self._watch is None or self._writer is None or now - self._glanced < _GLANCE:
            return False
        self._glanced = now
        roster = self._watch.newest()
        if roster is None or roster.generation <= self._writer.generation:
            return False
        self.joined(roster.generation)
        return True


class _Alone(Session):
    """No other task makes the calls of this one, or takes its place in one."""

    def _keep(self, result: Any) -> None:
        """Nobody is told."""

    def is_done(self) -> bool:
        return False

    def within(self) -> dict[str, Any] | None:
        return None


class _Unpaced(Lockstep):
    """Nothing is done together."""

    @property
    def arriving(self) -> bool:
        return False

    def insist(self, key: Key, work: Work) -> NDArray[Any]:
        return np.empty(0)
