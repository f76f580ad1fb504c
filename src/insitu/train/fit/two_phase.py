"""The two-phase step: gradients of this task's shards, the exchange, the update.

Nothing of the model changes before the exchange has succeeded, so a lost peer leaves the replica at the
beginning of the step, as an ordinary exception at a known point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.exchange import Group
from insitu.train.collectives import gather_rows, squeeze_shards
from insitu.train.elastic import Lockstep, LoopPosition
from insitu.train.fit.data_fingerprint import check_same_data
from insitu.train.replica import BatchTotals, Logs, NeedsTotals, Replica, ShardBatch

_CHECKED = 2
"""Elements at the end of each shard's row that all tasks compare."""


class TwoPhaseStep:
    """Trains, tests and predicts with one replica over the shards of one group.

    The buffers live in the group's memory: one row of `floats` for each shard of this task. They are
    allocated again for each generation of the group.
    """

    def __init__(self, replica: Replica, lockstep: Lockstep) -> None:
        self._replica = replica
        self._lockstep = lockstep
        #: The last mean gradient, if it is kept; else None. Written by `train`.
        self._gradient: NDArray[Any] | None = None
        self._keeps_gradients = False
        #: Rows of all shards of all tasks that were trained on.
        self.rows_done = 0
        #: The generation of the group that `_floats` were made for. Written by `_buffer`.
        self._generation = -1
        #: The shards that the records were made for. Written by `_make_records`.
        self._shards: tuple[int, ...] | None = None
        #: Gradients: a row for each shard of this task, in the group's memory.
        self._floats: NDArray[Any] | None = None
        #: The same memory as the group takes it.
        self._floats_by_shard: NDArray[Any] = np.empty(0)
        #: Data of each shard beside its gradient: the replica's record, which begins with the number of
        #: rows, then the number of the plan, and the fingerprint of the global batch.
        self._train_rows: NDArray[np.float64] = np.empty(0)
        self._test_rows: NDArray[np.float64] = np.empty(0)
        #: The replica's part of these.
        self._train_records: NDArray[np.float64] = np.empty(0)
        self._test_records: NDArray[np.float64] = np.empty(0)

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        """See `StepExecutor`."""
        means: list[NDArray[Any]] = []

        def work(group: Group) -> NDArray[Any]:
            report("gradient")
            # A collective call, so before it depends on what a replica knows: one that has just begun has yet
            # to find out that its losses need totals.
            self._buffer(group)
            with_totals(self._replica, parts, group, lambda: self.compute(parts, group), training=True)
            report("exchange")
            means.append(self.exchange(group))
            return self._with_fingerprints(self._train_rows, parts)

        # The records are gathered last: who has them knows that everybody has the means.
        records = _checked(self._lockstep.run_unit(position, work), position)
        # As a list: to ask NumPy costs many times more, in every step.
        rows = records[:, 0].tolist()
        if not any(rows):
            raise TrainingError("A step must have at least one row over all shards. Received: none.")
        self.rows_done += int(sum(rows))
        if self._keeps_gradients:
            # Before the update: an optimizer may change them in place.
            self._gradient = means[-1].copy()
        report("update")
        return self._replica.apply(means[-1], records)

    def keep_gradients(self) -> None:
        """Keep a copy of the gradient of each step from now on."""
        self._keeps_gradients = True

    def read_gradients(self) -> dict[str, NDArray[Any]]:
        """Return the mean gradient of the last step, by the path of the variable; nothing before it."""
        if self._gradient is None:
            return {}
        spans = [(variable, span) for variable, span in self._replica.float_spans() if variable.trainable]
        return {v.path: self._gradient[span.start : span.stop].reshape(span.shape) for v, span in spans}

    def compute(self, parts: Sequence[ShardBatch], group: Group) -> None:
        """Compute the gradients of `parts` into the buffers. Changes nothing else."""
        floats = self._buffer(group)
        for index, part in enumerate(parts):
            self._train_records[index] = 0
            if part.rows:
                self._replica.gradient(part.shard, part.data, floats[index], self._train_records[index])

    def exchange(self, group: Group) -> NDArray[Any]:
        """Return the mean over all shards of all tasks by rows."""
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
            self._train_rows = np.zeros((len(group.shards), self._replica.train_record_size + _CHECKED))
            self._test_rows = np.zeros((len(group.shards), self._replica.test_record_size + _CHECKED))
            self._train_records, self._test_records = (
                rows[:, :-_CHECKED] for rows in (self._train_rows, self._test_rows)
            )

    def _with_fingerprints(
        self, rows: NDArray[np.float64], parts: Sequence[ShardBatch]
    ) -> NDArray[np.float64]:
        rows[:, -2] = self._replica.plan_number
        for index, part in enumerate(parts):
            rows[index, -1] = part.fingerprint
        return squeeze_shards(rows)

    def example_output(self, data: Any) -> Any:
        """See `StepExecutor`."""
        return self._predict(0, data)[0]

    def test(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> Logs:
        """See `StepExecutor`."""

        def work(group: Group) -> NDArray[Any]:
            self._make_records(group)
            with_totals(self._replica, parts, group, lambda: self._evaluate(parts), training=False)
            return self._with_fingerprints(self._test_rows, parts)

        return self._replica.merge(_checked(self._lockstep.run_unit(position, work), position))

    def _evaluate(self, parts: Sequence[ShardBatch]) -> None:
        for index, part in enumerate(parts):
            self._test_records[index] = 0
            if part.rows:
                self._replica.evaluate(part.shard, part.data, self._test_records[index])

    def predict(self, position: LoopPosition, parts: Sequence[ShardBatch], example: Any) -> Any:
        """See `StepExecutor`."""
        gathered: list[Any] = []
        replica = self._replica

        def work(group: Group) -> NDArray[Any]:
            # Data of each shard: its number of rows, and where it moves the seeds.
            record = np.zeros((len(group.shards), 1 + replica.seeds_size + _CHECKED))
            outputs: list[Any] = [None] * len(parts)
            for index, part in enumerate(parts):
                if part.rows:
                    outputs[index], record[index, 1:-_CHECKED] = self._predict(part.shard, part.data)
                    record[index, 0] = part.rows
            gathered.append(gather_rows(group, outputs, example))
            return self._with_fingerprints(record, parts)

        records = _checked(self._lockstep.run_unit(position, work), position)
        active = records[records[:, 0] > 0]
        if replica.seeds_size and len(active):
            replica.assign_seeds(active[0, 1:])
        return gathered[-1]

    def _predict(self, shard: int, data: Any) -> tuple[Any, NDArray[np.float64]]:
        return self._replica.run_with_seeds_of(shard, lambda: self._replica.predict(data))


def _checked(rows: NDArray[np.float64], position: LoopPosition) -> NDArray[np.float64]:
    """Return the records of all shards without what is checked. Raises InputError if the data differ, and
    TrainingError if the plans do."""
    fingerprints, plans = rows[:, -1].tolist(), rows[:, -2].tolist()
    if fingerprints.count(fingerprints[0]) != len(fingerprints):
        check_same_data(fingerprints, position)
    if plans.count(plans[0]) != len(plans):
        raise TrainingError(
            "All tasks must combine the steps of a model in the same way. Received: at "
            f"{position}, another way in shard {next(i for i, p in enumerate(plans) if p != plans[0])} than "
            "in shard 0, found out by running a step on made-up rows. Let the model's code not depend on the "
            "task, nor on random numbers that are not Keras'."
        )
    return rows[:, :-_CHECKED]


# Add up, over all shards, what the losses of a step divide by, and gather the rows that they go over


def with_totals(
    replica: Replica,
    parts: Sequence[ShardBatch],
    group: Group,
    compute: Callable[[], None],
    *,
    training: bool,
) -> None:
    """Call `compute`, which runs a step of `replica` on each of `parts`. If losses need totals, these are
    exchanged before. All tasks find out alike, in their first step. Collective."""
    if not replica.needs_totals(training=training):
        try:
            compute()
            if not any(part.rows for part in parts):
                replica.find_out(training=training)
            return
        except NeedsTotals:
            pass
    _exchange_totals(replica, parts, group, training=training)
    compute()


def _exchange_totals(replica: Replica, parts: Sequence[ShardBatch], group: Group, *, training: bool) -> None:
    counts = [replica.count_losses(part.shard, part.data, training=training) for part in parts]
    own = np.stack([[part.rows, *count.totals] for part, count in zip(parts, counts, strict=True)])
    counted = group.all_gather(squeeze_shards(own.astype(np.float64)))
    rows = [list(count.rows) if part.rows else None for part, count in zip(parts, counts, strict=True)]
    gathered = gather_rows(group, rows, list(counts[0].rows)) if counts[0].rows else []
    starts = np.cumsum(counted[:, 0]) - counted[:, 0]
    replica.set_totals(BatchTotals(counted.sum(0), gathered, starts.astype(np.int64)), training=training)
