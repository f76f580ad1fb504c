"""Finds the position of a restarted custom loop in its data, if the loop itself doesn't say it.

A loop restores a checkpoint of its own, of which insitu knows nothing. But its weights reveal which one it
was: while a loop runs, the chief notes a hash of them when an epoch of the data begins and when it ends. A
loop of a later attempt that begins with such weights resumes at that epoch. One that begins with the weights
that its script has made starts from scratch. Nothing else is known, and refused if it would change the rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from insitu.base.context import Context
from insitu.base.errors import UnknownPosition
from insitu.grid import DataPosition
from insitu.train.custom_loop.replica_check import hash_values
from insitu.train.custom_loop.scope import CreationTracker
from insitu.train.replica import read_call_count

_LOG = logging.getLogger("insitu")
_ADVICE = (
    "Say it: save and restore the data with the rest, by tf.train.Checkpoint(data=data, ...) or by "
    "data.state_dict() and data.load_state_dict(), or call data.set_epoch(N) before each epoch"
)


@dataclass(frozen=True, slots=True)
class EpochNote:
    """How far the data of a loop was when an epoch began or ended."""

    #: That of the roster which the tasks of the attempt were launched for: later attempts have higher ones.
    generation: int
    #: A hash of the weights.
    weights: str
    #: For each distributed dataset, in the order in which they were made, the epoch that it begins next.
    epochs: tuple[int, ...]
    #: The dataset whose next epoch begins now; None if an epoch has ended.
    begins: int | None

    def epoch_of(self, number: int) -> int:
        """Return the epoch that dataset `number` begins next."""
        return self.epochs[number] if number < len(self.epochs) else 0


class EpochLog:
    """The log of a strategy's loops. Outside a job there is none, and nothing is found."""

    def __init__(self, context: Context, tracker: CreationTracker, count_updates: Callable[[], int]) -> None:
        """`count_updates` returns the updates that this process has run."""
        self._context = context
        self._tracker = tracker
        self._count_updates = count_updates
        self._path: Path | None = context.job.loop_epochs if context.job is not None else None
        #: Entries of earlier attempts of the job.
        self._earlier = [e for e in self._read() if e.generation < context.generation]
        #: Those of the datasets that were distributed, in order.
        self._positions: list[DataPosition] = []
        #: Updates of the optimizers that no run of this process has made, when an epoch began last; None
        #: before.
        self._restored_updates: int | None = None
        tracker.keeps_first_values = bool(self._earlier)

    @property
    def is_restarted(self) -> bool:
        """Whether an earlier attempt of the job had begun a loop."""
        return bool(self._earlier)

    def add(self, position: DataPosition) -> int:
        """Return the number of a dataset that was distributed."""
        self._positions.append(position)
        return len(self._positions) - 1

    def find(self, number: int, data: str, *, matters: bool) -> None:
        """Move all datasets to their positions in the loop that begins to iterate over dataset `number`.

        Raises UnknownPosition if that `matters` and isn't known. `data` describes the dataset.
        """
        position, restored = self._positions[number], self._count_optimizers_updates() - self._count_updates()
        goes_on = self._restored_updates is not None and restored <= self._restored_updates
        self._restored_updates = restored
        if position.is_said:
            self._move([e for e in self._earlier if e.epoch_of(number) == position.epoch])
            return
        furthest = max((entry.epoch_of(number) for entry in self._earlier), default=0)
        if furthest == 0:
            if matters and restored > 0 and not (goes_on or self._earlier or self._has_fits()):
                self._warn_of_updates(restored, data)
            return
        if self._starts_over(number) or self._look_up(number) or goes_on or not matters:
            return
        raise UnknownPosition(
            "A restarted loop that continues from its own checkpoint must know where its data stands. "
            f"Received: a loop over {data}, of which an earlier attempt had come to epoch {furthest}, and "
            f"weights that are those of no one beginning of an epoch. {_ADVICE}"
        )

    def _look_up(self, number: int) -> bool:
        """Move all datasets to where they were with the present weights. Returns False if that isn't sure."""
        weights = hash_values(self._tracker.weights())
        found = [entry for entry in self._earlier if entry.weights == weights]
        epochs = {entry.epoch_of(number) for entry in found}
        # One that is distributed in the loop is another dataset each time.
        begun_again = any(e.begins == number and e.epoch_of(number) > 0 for e in self._earlier)
        if len(epochs) != 1 or not (epochs == {0} or begun_again):
            return False
        return self._move(found)

    def _move(self, found: list[EpochNote]) -> bool:
        """Move datasets to the latest of these entries. Returns False if others were distributed then."""
        if not found or any(len(entry.epochs) != len(self._positions) for entry in found):
            return False
        latest = max(found, key=lambda entry: sum(entry.epochs))
        for position, epoch in zip(self._positions, latest.epochs, strict=True):
            if not (position.is_said or position.is_under_way):
                position.move(epoch)
        return True

    def _starts_over(self, number: int) -> bool:
        """Return whether the loop begins with the weights that the script has made, before any update."""
        if self._count_optimizers_updates() or not self._tracker.are_weights_as_made():
            return False
        return not self._stands_still(number)

    def _stands_still(self, number: int) -> bool:
        """Return whether an epoch of earlier attempts left the weights as they were, and none has changed
        them: then they reveal nothing."""
        stood_still = False
        for _, attempt in groupby(self._earlier, lambda entry: entry.generation):
            begun: dict[int, str] = {}
            entries = list(attempt)
            if len({entry.weights for entry in entries}) > 1:
                return False
            for entry in entries:
                if entry.begins == number:
                    begun[entry.epoch_of(number)] = entry.weights
                elif entry.begins is None:
                    stood_still |= begun.get(entry.epoch_of(number) - 1) == entry.weights
        return stood_still

    def _count_optimizers_updates(self) -> int:
        # With gradient accumulation not each gradient is an update.
        return max((read_call_count(each) for each in self._tracker.optimizers), default=0)

    def _has_fits(self) -> bool:
        """Return whether a model may have been trained in this process by other ways than a loop."""
        return any(getattr(layer, "compiled", False) for layer in self._tracker.layers)

    def _warn_of_updates(self, updates: int, data: str) -> None:
        warnings.warn(
            f"A loop begins with epoch 0 of {data}, though its optimizers have made {updates} updates "
            "elsewhere. If it continues from a checkpoint, it gets the rows of epoch 0 again, unless it says "
            f"where its data stands. {_ADVICE}.",
            stacklevel=2,
        )

    def note(self, begins: int | None = None) -> None:
        """Note that the next epoch of dataset `begins` begins now, or that one has ended."""
        if self._path is None or not self._context.is_chief:
            return
        weights = hash_values(self._tracker.weights())
        epochs = [position.epoch for position in self._positions]
        line = json.dumps([self._context.generation, self._tracker.number, weights, epochs, begins])
        try:
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            _LOG.warning(
                "Where a custom loop stands in its data couldn't be written: %s. Training continues.", error
            )

    def _read(self) -> Iterator[EpochNote]:
        """Yield what was noted. A line that was cut off is left out. Raises OSError if the storage fails: the
        loop would begin with epoch 0 again."""
        try:
            lines = self._path.read_text().splitlines() if self._path is not None else []
        except FileNotFoundError:
            return
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                generation, strategy, weights, epochs, begins = json.loads(line)
                if strategy == self._tracker.number:
                    yield EpochNote(int(generation), str(weights), tuple(map(int, epochs)), begins)
