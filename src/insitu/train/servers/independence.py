"""Membership of a task that trains on servers: it depends on no other worker.

What keeps synchronous workers in step (units that all do together, places in a group) is switched off; the
group is joined where a script asks for it (`strategy.reduce`, `gather`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.context import Context
from insitu.train.lockstep import Key, Lockstep, Work
from insitu.train.membership import Membership
from insitu.train.session import Session


class ServerMembership(Membership):
    """See `Membership`. The chief is worker 0."""

    shards_move = False

    def __init__(self, context: Context, transport: str = "auto") -> None:
        super().__init__(context, transport)
        self.session = _Alone()
        self.lockstep = _Unpaced(self._places, self.session)
        self.session.lockstep = self.lockstep

    @property
    def leads(self) -> bool:
        return self.context.is_chief


class _Alone(Session):
    """No other task makes the calls of this one, or takes its place in one."""

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
