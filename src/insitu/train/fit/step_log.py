"""Prints a line every so many steps: the step, its logs, and how fast the training is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras

from insitu.base.errors import TrainingError
from insitu.train.fit.trainer import KerasTrainer, trainer_of
from insitu.train.replica import count_calls_of_update, read_update_count


class _Pace:
    """Progress of a training when the last line was printed, or at its first step."""

    def __init__(self, steps: int, rows: int | None, next_line: int) -> None:
        #: Steps of this process.
        self.steps = steps
        #: Rows of all tasks; None if they aren't counted.
        self.rows = rows
        #: The progress at which the next line is printed.
        self.next_line = next_line
        #: When it was, by the monotonic clock, moved by the time that tests took since.
        self.at = time.monotonic()
        #: When the tests under way began.
        self.tests_began = 0.0


class StepLog(keras.callbacks.Callback):
    """Prints a line every `every` steps, in the chief:

    ```
    step 1200, loss = 0.4213, accuracy = 0.8672, 8,123 examples/s, 15.7 ms/batch
    ```

    A step is an update of the model, counted through recoveries and restarts. Examples are those of all
    tasks. With parameter servers they are those of the chief itself; other workers make updates between its
    steps, so that a line may come some updates late. The time is that of a whole step of the chief, without
    validation. Logs are as Keras shows them: means over the epoch so far. One replica outside a job trains by
    Keras' own loop, which doesn't count examples: then the line is without them.

    Args:
        every: steps between two lines.
        write: called with each line; None: the line is printed.

    Raises:
        TrainingError: for a number of steps below 1.

    Example:
        >>> callback = insitu.StepLog(every=50)
    """

    hears_batches = False
    """Read by `fit` under a strategy, which calls `end_step` instead: that costs less than Keras' call."""

    remembers_steps = False
    """Read by `fit`: nothing of it is carried over to another process."""

    def __init__(self, every: int = 100, *, write: Callable[[str], None] | None = None) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise TrainingError(f"every is a number of steps, at least 1. Received: {every!r}")
        self.every = every
        self._write = write
        #: Pace of the training under way; None before its first step. An object, to stay in this process.
        self._pace: _Pace | None = None
        #: Returns (steps of this process, rows of all tasks). Written as a training begins.
        self._count: Callable[[], tuple[int, int | None]] | None = None
        #: Returns the trainer of the model if insitu does the steps, else None.
        self._find_trainer: Callable[[], Any] = _nobody

    def on_train_begin(self, logs: Any = None) -> None:
        trainer = trainer_of(self.model)
        self._pace, self._count, self._find_trainer = None, _Batches(), _nobody
        if trainer is not None and trainer.callbacks is not None:
            self._find_trainer = lambda: trainer
            self._count = partial(_count_done, trainer) if trainer.membership.context.is_chief else None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hear of a step from Keras' own loop."""
        if isinstance(self._count, _Batches):
            self._count.end(batch)
            self.end_step(logs)

    def end_step(self, logs: Any) -> None:
        """Hear of a step that was done."""
        pace, count = self._pace, self._count
        if count is None:
            return
        steps, rows = count()
        if pace is None:
            # Pace counts from here on, since the first step is compiled.
            self._pace = _Pace(steps, rows, self._find_next_line(steps))
        elif self._read_progress(steps) >= pace.next_line:
            self._print(pace, steps, rows, logs or {})

    def _read_progress(self, steps: int) -> int:
        """Return how far the training is: the servers' updates, which others make too. Else this process'
        steps, since it takes time to read the optimizer's count."""
        trainer = self._find_trainer()
        updates = trainer.strategy.count_updates() if trainer is not None else None
        return steps if updates is None else updates

    def _find_next_line(self, steps: int) -> int:
        """Return the progress at which the next line is due."""
        updates = self._read_updates()
        more = self.every if updates is None else self.every - updates % self.every
        optimizer = getattr(self.model, "optimizer", None)
        return self._read_progress(steps) + more * count_calls_of_update(optimizer)

    def _read_updates(self) -> int | None:
        trainer = self._find_trainer()
        if trainer is not None:
            found: int | None = trainer.loop.count_updates(trainer.loop.position)
            return found
        optimizer = getattr(self.model, "optimizer", None)
        return read_update_count(optimizer) if optimizer is not None else None

    def _print(self, pace: _Pace, steps: int, rows: int | None, logs: Mapping[str, Any]) -> None:
        seconds = max(time.monotonic() - pace.at, 1e-9)
        updates = self._read_updates()
        parts = [f"step {steps if updates is None else updates}"]
        parts += [f"{name} = {float(value):.4g}" for name, value in _loss_first(logs)]
        if rows is not None and pace.rows is not None:
            parts.append(f"{(rows - pace.rows) / seconds:,.0f} examples/s")
        parts.append(f"{1000 * seconds / (steps - pace.steps):.3g} ms/batch")
        self._pace = _Pace(steps, rows, self._find_next_line(steps))
        if self._write is not None:
            self._write(", ".join(parts))
        else:
            sys.stdout.write(f"{', '.join(parts)}\n")
            sys.stdout.flush()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._pace is not None:
            self._pace.tests_began = time.monotonic()

    def on_test_end(self, logs: Any = None) -> None:
        if self._pace is not None and self._pace.tests_began:
            self._pace.at += time.monotonic() - self._pace.tests_began
            self._pace.tests_began = 0.0


class _Batches:
    """Counts the steps of Keras' own loop."""

    def __init__(self) -> None:
        #: Steps that are done.
        self.steps = 0
        #: Those of the epoch under way.
        self._of_epoch = 0

    def end(self, batch: int) -> None:
        """Count all steps of the epoch up to `batch`, from 0."""
        self.steps += batch + 1 - (self._of_epoch if batch >= self._of_epoch else 0)
        self._of_epoch = batch + 1

    def __call__(self) -> tuple[int, int | None]:
        return self.steps, None


def _loss_first(logs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(logs.items(), key=lambda item: item[0] != "loss")


def _count_done(trainer: KerasTrainer) -> tuple[int, int | None]:
    """Return the steps of this process, and the rows of all tasks; of this one if those aren't known."""
    reporter = trainer.bookkeeper.reporter
    totals = [rows for each in trainer.executors if (rows := getattr(each, "rows_done", None)) is not None]
    return reporter.sampler.steps, sum(totals) if totals else reporter.rows


def _nobody() -> None:
    return None
