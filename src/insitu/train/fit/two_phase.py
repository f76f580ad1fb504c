"""The two-phase step: gradients of this task's shards, the exchange, the update.

Nothing of the model changes before the exchange has succeeded, so a lost peer leaves the replica at the
beginning of the step, as an ordinary exception at a known point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.collectives import barrier_token, gather_rows, squeeze_shards
from insitu.train.elastic import Lockstep, Membership
from insitu.train.fit.feed import Feed
from insitu.train.replica import Logs, Replica, ShardBatch

if TYPE_CHECKING:
    from insitu.train.fit.trainer import Binding


class StepExecutor(Protocol):
    """What a strategy makes out of a compiled model for batches of one structure. All of it is collective
    but `example_output`.

    A step that raises `lockstep.Again` has changed nothing, and is called again with the parts of the shards
    that this task then has.
    """

    def train(self, parts: Sequence[ShardBatch], at: Callable[[str], None]) -> Logs:
        """One update of the model from the rows of `parts`, one part for each shard of this task. Says by
        `at` what it is about to do. The logs are the same in each task."""

    def test(self, parts: Sequence[ShardBatch]) -> Logs:
        """The metrics over all that was tested since they were reset."""

    def predict(self, parts: Sequence[ShardBatch], example: Any) -> Any:
        """Outputs for the rows of all shards of all tasks, in shard order; the same in each task.

        `example` is the model's output for any one row.
        """

    def example_output(self, data: Any) -> Any:
        """Arrays of the structure, dtypes and shapes of the model's output for `data`; no other task takes
        part."""


class Layout(Protocol):
    """What a binding needs of its strategy."""

    @property
    def membership(self) -> Membership:
        """Who this process is among the tasks."""

    def check_open(self, model: Any) -> None:
        """Raises TrainingError where `model` is trained in the scope of another strategy."""

    def placement(self) -> AbstractContextManager[Any]:
        """Where variables are made."""

    def before_build(self, model: Any, example: Any, part_rows: int | None) -> None:
        """`model` is about to be built for batches like `example`, `part_rows` rows a shard at most."""

    def begin_fit(self, binding: Binding, feed: Feed, epochs: int, steps: int | None) -> None:
        """A fit of so many epochs and steps an epoch begins; may say where in it (`Binding.go_on_at`)."""

    def evaluation_options(self, x: Any) -> dict[str, Any]:
        """Which shards of `x` this task evaluates: options of `make_feed`."""

    def expect_saves(self) -> None:
        """The fit that begins will have its state saved now and then."""

    def save_elsewhere(self) -> bool:
        """Saves the training's state where it is, if that isn't in the replicas; whether it did."""

    def left_out(self) -> Collection[int]:
        """The shards of this task whose rows of the last step entered no update."""

    def end_fit(self, binding: Binding) -> None:
        """A fit has come to its end."""

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        """The step of `model` for batches like `example`; `first` where the model has none yet."""


class TwoPhaseStep:
    """Trains, tests and predicts with one replica over the shards of one group.

    The buffers live in the group's memory: one row of `floats` for each shard of this task. They are made
    anew for each generation of the group.
    """

    def __init__(self, replica: Replica, lockstep: Lockstep) -> None:
        self._replica = replica
        self._lockstep = lockstep
        self._generation = -1
        self._shards: tuple[int, ...] | None = None
        self._floats: NDArray[Any] | None = None
        self._floats_by_shard: NDArray[Any] = np.empty(0)
        self._train_records: NDArray[np.float64] = np.empty(0)
        self._test_records: NDArray[np.float64] = np.empty(0)

    def train(self, parts: Sequence[ShardBatch], at: Callable[[str], None]) -> Logs:
        means: list[NDArray[Any]] = []

        def work(group: Group) -> NDArray[Any]:
            at("gradient")
            self.compute(parts, group)
            at("exchange")
            means.append(self.exchange(group))
            return squeeze_shards(self._train_records)

        # The records are gathered last: who has them knows that everybody has the means.
        records = self._lockstep.perform(self._lockstep.key, work)
        # As a list: to ask NumPy costs many times more, in every step.
        if not any(records[:, 0].tolist()):
            raise TrainingError("A step must have at least one row over all shards. Received: none.")
        at("update")
        return self._replica.apply(means[-1], records)

    def compute(self, parts: Sequence[ShardBatch], group: Group) -> None:
        """Phase one: the gradients of `parts` into the buffers. Changes nothing else."""
        floats = self._buffer(group)
        for index, part in enumerate(parts):
            self._train_records[index] = 0
            if part.rows:
                self._replica.gradient(part.shard, part.data, floats[index], self._train_records[index])

    def exchange(self, group: Group) -> NDArray[Any]:
        """The mean over all shards of all tasks by rows."""
        weights = self._train_records[:, 0].tolist()
        means = group.all_reduce(self._floats_by_shard, op="weighted_mean", weights=weights)
        return means

    def _buffer(self, group: Group) -> NDArray[Any]:
        # Not before it's needed: a step that only tests needs none.
        self._make_records(group)
        if self._floats is None or self._generation != group.generation:
            shape = (len(group.shards), self._replica.floats_size)
            self._floats = group.buffer(shape, self._replica.floats_dtype)
            # Kept: the group prepares an operation once for each array object.
            self._floats_by_shard = squeeze_shards(self._floats)
            self._generation = group.generation
        return self._floats

    def _make_records(self, group: Group) -> None:
        if self._shards != group.shards:
            self._shards = group.shards
            self._train_records = np.zeros((len(group.shards), self._replica.train_record_size))
            self._test_records = np.zeros((len(group.shards), self._replica.test_record_size))

    def example_output(self, data: Any) -> Any:
        return self._replica.predict(data)

    def test(self, parts: Sequence[ShardBatch]) -> Logs:
        def work(group: Group) -> NDArray[Any]:
            self._make_records(group)
            for index, part in enumerate(parts):
                self._test_records[index] = 0
                if part.rows:
                    self._replica.evaluate(part.shard, part.data, self._test_records[index])
            return squeeze_shards(self._test_records)

        return self._replica.merge(self._lockstep.perform(self._lockstep.key, work))

    def predict(self, parts: Sequence[ShardBatch], example: Any) -> Any:
        gathered: list[Any] = []

        def work(group: Group) -> NDArray[Any]:
            outputs = [self._replica.predict(part.data) if part.rows else None for part in parts]
            gathered.append(gather_rows(group, outputs, example))
            return barrier_token(group)

        self._lockstep.perform(self._lockstep.key, work)
        return gathered[-1]
