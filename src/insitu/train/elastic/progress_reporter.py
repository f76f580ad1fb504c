"""Reports where this task is while it trains, for the controller, `insitu ps` and `insitu describe`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from insitu.context import Context
from insitu.progress import IDLE, ProgressWriter
from insitu.train.elastic.position import EPOCH, SETUP, TEST, LoopPosition
from insitu.train.elastic.step_sampler import StepSampler

_BEFORE_TRAINING = LoopPosition(0, SETUP, epoch=-1, step=-1)


class ProgressReporter:
    """Writes this task's progress record. Outside a job nobody reads it, so nothing is written.

    A record also says whether the task is elastic: whether the job can go on with a replacement if another
    task is lost now.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Writes the record; None outside a job, and before `open`.
        self._writer: ProgressWriter | None = None
        #: The position of the last `report`, which reports of a place alone repeat.
        self._position = _BEFORE_TRAINING
        #: What this task was about to do at the last report, such as `gradient`.
        self._place = ""
        #: Rows that entered the model in this process. Written by `Bookkeeper`.
        self.rows = 0
        #: Measures what this task does.
        self.sampler = StepSampler(context)
        #: Whether recovery was disabled for the rest of this process.
        self._disabled = False
        #: Whether a call is under way in the middle of another.
        self._paused = False

    def open(self) -> None:
        """Create the progress record, once."""
        job = self._context.job
        if job is not None and self._writer is None:
            self._writer = ProgressWriter(job.progress(self._context.task))
            self.sampler.open()

    def report(self, position: LoopPosition, place: str) -> None:
        """Report that the task is about to do `place` of the unit at `position`."""
        self._position = position
        self.report_place(place)

    def report_place(self, place: str) -> None:
        """Report what the task is about to do, at the position of the last report."""
        self._place = place
        self.sampler.report_place(place)
        self._write()

    def _write(self) -> None:
        if self._writer is not None:
            self._writer.elastic = self.elastic and self._writer.generation > 0
            self._writer.steps_over = self._position.kind in (TEST, EPOCH)
            self._writer.write(self._position.epoch, self._position.step, self.rows, self._place)

    def report_idle(self) -> None:
        """Report that training has stopped: the task may take as long as it likes for whatever it does."""
        self.report_place(IDLE)
        self.sampler.end()

    def begin_training(self, read_updates: Callable[[LoopPosition], int | None]) -> None:
        """Begin a training. `read_updates` returns the updates of its model, given the position that comes
        next, or None where they aren't known."""
        self.open()
        self.sampler.begin(read_updates)

    def count_step(self, logs: Mapping[str, Any]) -> None:
        """Count the step of the last report, which was done with these logs."""
        self.sampler.count_step(self._position.next_step(), self.rows, logs)

    @property
    def place(self) -> str:
        """What this task was about to do at the last report."""
        return self._place

    @property
    def elastic(self) -> bool:
        """Whether this task can go on with another in the place of one that is lost."""
        return not (self._disabled or self._paused)

    def disable_recovery(self) -> None:
        """Report from now on that a loss restarts all tasks."""
        if not self._disabled:
            self._disabled = True
            self._write()

    @contextlib.contextmanager
    def pause_recovery(self) -> Iterator[None]:
        """Report while open that a loss restarts all tasks: a replacement can't get to where this one is."""
        outer, self._paused = self._paused, True
        self._write()
        try:
            yield
        finally:
            self._paused = outer
            self._write()

    def set_generation(self, generation: int) -> None:
        """Report with the next record that this task's group is of `generation`."""
        if self._writer is not None:
            self._writer.generation = generation
