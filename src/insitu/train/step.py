"""The two-phase step: gradients of this task's shards, the exchange, the update.

Nothing of the model changes before the exchange has succeeded, so a lost peer leaves the replica at the
beginning of the step, as an ordinary exception at a known point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.backends import Logs, Replica
from insitu.train.feed import Part
from insitu.train.gather import by_shard, gather_rows


class Step(Protocol):
    """What a strategy makes out of a compiled model for batches of one structure. All of it is collective
    but `example_output`."""

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        """One update of the model from the rows of `parts`, one part for each shard of this task. Says by
        `at` what it is about to do. The logs are the same in each task."""

    def test(self, parts: Sequence[Part]) -> Logs:
        """The metrics over all that was tested since they were reset."""

    def predict(self, parts: Sequence[Part], example: Any) -> Any:
        """Outputs for the rows of all shards of all tasks, in shard order; the same in each task.

        `example` is the model's output for any one row.
        """

    def example_output(self, data: Any) -> Any:
        """Arrays of the structure, dtypes and shapes of the model's output for `data`; no other task takes
        part."""


class TwoPhaseStep:
    """Trains, tests and predicts with one replica over the shards of one group.

    The buffers live in the group's memory: one row of `floats` for each shard of this task.
    """

    def __init__(self, replica: Replica, group: Group) -> None:
        self._replica = replica
        self._group = group
        shards = len(group.shards)
        self._floats: NDArray[Any] | None = None
        self._floats_by_shard: NDArray[Any] = np.empty(0)
        self._train_records = np.zeros((shards, replica.train_record_size))
        self._test_records = np.zeros((shards, replica.test_record_size))

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        at("gradient")
        self.compute(parts)
        at("exchange")
        exchanged = self.exchange()
        at("update")
        return self.update(exchanged)

    def compute(self, parts: Sequence[Part]) -> None:
        """Phase one: the gradients of `parts` into the buffers. Changes nothing else."""
        floats = self._buffer()
        for index, part in enumerate(parts):
            self._train_records[index] = 0
            if part.rows:
                self._replica.gradient(part.shard, part.data, floats[index], self._train_records[index])

    def exchange(self) -> tuple[Any, Any]:
        """The mean over all shards of all tasks by rows, and everybody's records."""
        records = self._group.all_gather(by_shard(self._train_records))
        weights = self._train_records[:, 0].tolist()
        if not records[:, 0].any():
            raise TrainingError("A step must have at least one row over all shards. Received: none.")
        floats = self._group.all_reduce(self._floats_by_shard, op="weighted_mean", weights=weights)
        return floats, records

    def update(self, exchanged: tuple[Any, Any]) -> Logs:
        """Phase two: the update, the same in each task."""
        return self._replica.apply(*exchanged)

    def _buffer(self) -> NDArray[Any]:
        # Not before it's needed: a step that only tests needs none.
        if self._floats is None:
            shape = (len(self._group.shards), self._replica.floats_size)
            self._floats = self._group.buffer(shape, self._replica.floats_dtype)
            # Kept: the group prepares an operation once for each array object.
            self._floats_by_shard = by_shard(self._floats)
        return self._floats

    def example_output(self, data: Any) -> Any:
        return self._replica.predict(data)

    def test(self, parts: Sequence[Part]) -> Logs:
        for index, part in enumerate(parts):
            self._test_records[index] = 0
            if part.rows:
                self._replica.evaluate(part.shard, part.data, self._test_records[index])
        return self._replica.merge(self._group.all_gather(by_shard(self._test_records)))

    def predict(self, parts: Sequence[Part], example: Any) -> Any:
        outputs = [self._replica.predict(part.data) if part.rows else None for part in parts]
        return gather_rows(self._group, outputs, example)
