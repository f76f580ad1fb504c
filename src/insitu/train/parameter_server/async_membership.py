"""Membership of a task that trains on servers: it depends on no other worker.

Workers do no units together. The group is joined when a script asks for it (`strategy.reduce`, `gather`).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.context import Context
from insitu.base.roster import RosterWatch
from insitu.exchange import Group
from insitu.train.elastic import (
    CallCounter,
    LoopPosition,
    Membership,
    ProgressReporter,
    ResumePoint,
    Work,
)

_POLL_INTERVAL = 0.05
"""Seconds between two looks for a newer roster."""


class ServerMembership(Membership):
    """See `Membership`. The chief is worker 0, and the leader."""

    reporter: GenerationFollower

    def __init__(self, context: Context, transport: str = "auto") -> None:
        super().__init__(context, GenerationFollower(context), transport, "none")
        self.calls = CallCounter()
        self.lockstep = IndependentUnits()
        #: The group of all workers; None until a script first asks for it.
        self._group: Group | None = None
        self.reporter.open()
        self.reporter.report_idle()

    @property
    def is_leader(self) -> bool:
        return self.context.is_chief

    def group(self) -> Group:
        self.reporter.disable_recovery()
        if self._group is None:
            self._group = self._rendezvous.join()
        return self._group


class IndependentUnits:
    """See `Units`. A worker does each by itself: there is nobody to wait for or to compare with."""

    def find_resume_point(self) -> ResumePoint | None:
        return None

    def check_before_next_unit(self) -> None:
        """Compare nothing: workers' weights differ."""

    def run_unit_until_done(self, position: LoopPosition, work: Work) -> NDArray[Any]:
        return np.empty(0)


class GenerationFollower(ProgressReporter):
    """Reports that this task trains in the newest generation: others' deaths don't concern it until its
    script asks for a group."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watch = RosterWatch(context.job.roster) if context.job is not None else None
        #: When the roster was last looked at, by the monotonic clock in seconds.
        self._last_look = -_POLL_INTERVAL

    def report_place(self, place: str) -> None:
        self._find_newer_generation()
        super().report_place(place)

    def follow_generation(self) -> None:
        """Report a newer generation if there is one. Called now and then while this task waits."""
        if self._find_newer_generation():
            super().report_place(self._place)

    def _find_newer_generation(self) -> bool:
        """Take over a newer generation; return whether there is one."""
        now = time.monotonic()
        if self._watch is None or self._writer is None or now - self._last_look < _POLL_INTERVAL:
            return False
        self._last_look = now
        roster = self._watch.newest()
        if roster is None or roster.generation <= self._writer.generation:
            return False
        self.set_generation(roster.generation)
        return True
