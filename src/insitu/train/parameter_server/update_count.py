"""Counts the updates that servers make of all workers' gradients, and ends a fit for all workers by them.

A worker learns with each pull how many updates there were. Where the chief ends a training before the planned
number, it leaves a lower one with the servers, where the others look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from insitu.train.parameter_server.server_marks import ServerMarks

FIRST, LIMIT = "first update", "last update"
"""Names of the numbers that the servers keep for a fit."""
_LOOK_INTERVAL = 0.5
"""Seconds between two looks for a lower limit, where steps needn't end together."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Where a fit ends, and what its updates are counted from."""

    #: The number of updates with which the fit ends for all workers; None: it is left to epochs.
    limit: int | None = None
    #: The updates that the chief's weights have had before the servers got them: in an earlier job.
    first: int = 0
    #: Whether workers look for the chief's lower limit behind each step, and so end at the same one.
    asks_each_step: bool = False


class UpdateCount:
    """The updates of the model on the servers, as this worker knows them."""

    def __init__(self, marks: ServerMarks, now: Callable[[], float] = time.monotonic) -> None:
        self._marks = marks
        self._now = now
        #: The updates before those that the servers count.
        self._first = 0
        #: The fit under way, and its plan. Written by `begin`.
        self._fit, self._plan = 0, UpdatePlan()
        #: The number of updates that ends the fit; None: none does. Written by `begin`, `end_at` and looks.
        self._limit: int | None = None
        #: When to look next for the chief's limit, in seconds of the clock.
        self._next_look = 0.0

    @property
    def count(self) -> int:
        """The updates that the weights have had which this worker pulled last."""
        return self._first + self._marks.version

    def offer_first(self, fit: int, first: int) -> None:
        """Have the updates before the servers' own counted, unless the fit has been started. For the chief,
        before it starts the fit."""
        if first and not self._marks.is_started(fit):
            self._marks.set_number(FIRST, 0, first)

    def begin(self, fit: int, plan: UpdatePlan) -> None:
        """Begin a fit that was started, or go on in it."""
        self._fit, self._plan, self._limit = fit, plan, plan.limit
        self._first = self._marks.read_number(FIRST, 0)
        self._look()

    def _look(self) -> None:
        """Take over the chief's limit."""
        self._next_look = self._now() + _LOOK_INTERVAL
        found = self._marks.read_number(LIMIT, self._fit)
        if found:
            self._limit = found if self._limit is None else min(found, self._limit)

    @property
    def is_at_limit(self) -> bool:
        """Whether the updates that are known here have reached the limit that is known here."""
        return self._limit is not None and self.count >= self._limit

    def is_over(self) -> bool:
        """Return whether the fit ends for this worker now. Called behind each of its steps."""
        if not self.is_at_limit and (self._plan.asks_each_step or self._now() >= self._next_look):
            self._look()
        return self.is_at_limit

    def end_at(self, limit: int) -> None:
        """Have the fit end for all workers with this number of updates. For the chief."""
        limit = max(1, limit)
        self._marks.set_number(LIMIT, self._fit, limit)
        self._limit = limit if self._limit is None else min(limit, self._limit)
