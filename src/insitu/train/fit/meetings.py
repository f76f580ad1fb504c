"""Lets all tasks meet around the callbacks of a fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from insitu.train.collectives import barrier_token
from insitu.train.elastic import RESTORE, LoopPosition, Membership, SynchronousMembership
from insitu.train.fit.chief_state import send_restored
from insitu.train.fit.entry import Key
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.fit.fit_records import FitRecords, find_place
from insitu.train.fit.loop_state import LoopState
from insitu.train.fit.writer_files import begin_files


class FitMeetings:
    """Does what all tasks do at certain points of a fit. See `FitListener`."""

    def __init__(
        self, membership: Membership, model: Any, loop: LoopState, fit: int, end_fit: Callable[[], None]
    ) -> None:
        """`fit` is the fit's number in the process, `end_fit` finishes it once its steps are done."""
        context = membership.context
        self._membership = membership
        self._model = model
        self._loop = loop
        self._fit = fit
        self.end_fit = end_fit
        is_synchronous = isinstance(membership, SynchronousMembership)
        #: Whether another can take this task's place while the others go on.
        self.can_be_replaced = is_synchronous and context.job is not None and len(context.workers) > 1
        #: What an earlier process of this task has recorded; None if others can tell how far this one is.
        self.records = (
            FitRecords(context.job.callbacks(context.task), fit)
            if context.job is not None and not is_synchronous
            else None
        )

    def start_at(self, epoch: int, step: int, lengths: EpochLengths) -> None:
        """Start the fit at a step: those before were done by another process of this task."""
        record = self.records.find(epoch, step) if self.records is not None and (epoch or step) else None
        if record is not None:
            place, entry = find_place(record, epoch, step, lengths)
            self._loop.take_record(place, entry, record.state)
        elif (epoch, step) != (0, 0):
            self._loop.start_at(epoch, step)

    def share_restored(self) -> None:
        """Send all tasks what a callback of the chief's has restored. Called as the training begins."""
        send_restored(self._membership, self._membership.calls.position(RESTORE), self._model)
        self._loop.gap.rebase()

    def begin_files(self, callbacks: Sequence[Any]) -> None:
        """Take out of the chief's files what its earlier processes have written of a fit that begins again
        from its beginning."""
        context = self._membership.context
        if context.job is not None and context.is_chief:
            begin_files(callbacks, context.job.callbacks(context.task) / f"files-{self._fit}.json")

    def meet(self, position: LoopPosition) -> None:
        """Wait for all tasks: their callbacks have heard of what comes before `position`."""
        if self.can_be_replaced:
            self._membership.lockstep.run_unit_until_done(position, barrier_token)

    def record(self, heard: Key) -> None:
        """Write down what callbacks remember, if no other task can tell the next process of this one."""
        if self.records is not None:
            self.records.write(heard, self._loop.record_state())
