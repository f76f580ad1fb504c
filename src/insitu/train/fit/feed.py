"""Cuts data into steps: for each shard of this task, its rows of the step's global batch.

Two kinds of feed. An `insitu.Dataset` gives each shard its own rows. Anything else that Keras takes (arrays,
tf.data, PyDataset, generators) is a source of *global* batches, the same in each process, of which each shard
takes its slice. In both, every row enters the model once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import keras
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils

from insitu.base.errors import InputError, TrainingError
from insitu.grid import Batch, Dataset
from insitu.train.fit.arrays import refuse_ragged
from insitu.train.fit.streams import Source
from insitu.train.replica import ShardBatch, StepBatch, count_rows, flatten_batch, map_batch

StepReader = Callable[[int, int], Iterator[StepBatch]]
"""Gives the steps of an epoch of the data, from a step on. Called once."""
_KEPT_BATCHES = 2
"""Global batches that a feed keeps: the one of the step under way, and one that Keras has read ahead."""


class Feed(Protocol):
    """A source of steps."""

    #: The source of global batches. That of an `insitu.Dataset` only receives epochs.
    source: Source
    #: The name of the cache that the rows come from; None for other sources.
    cache: str | None
    #: The most rows that one shard has in a step; None if it isn't known.
    part_rows: int | None

    @property
    def num_steps(self) -> int | None:
        """The number of steps of an epoch; None if that isn't known before the data has been read, and if it
        has no end."""

    @property
    def follows_epochs(self) -> bool:
        """Whether each epoch has rows, or an order of them, that follow from its number alone."""

    @property
    def is_refreshed(self) -> bool:
        """Whether epochs may have different rows, and so different numbers of steps."""

    def count_steps(self, number: int) -> int | None:
        """Return the steps of pass `number` over the rows, of which an epoch may have several; None if that
        isn't known."""

    def find_pass(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the pass over the rows, counted over all epochs, that a step is of, and its number in that.
        The ledger goes by passes."""

    def example(self, rows: int = 1) -> Any:
        """Return a batch of up to `rows` rows, at least one, that shows structure, dtypes and shapes."""

    def begin(self) -> StepReader:
        """Begin an iteration of the data."""

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        """Yield the steps of `epoch` from `start_step` on, in an iteration of their own."""

    def skip_epochs(self, count: int) -> None:
        """Let the next iteration be `count` epochs later than it would be. Raises InputError for data that
        can't go back."""

    def step_at(self, epoch: int, step: int) -> StepBatch:
        """Return one step, of the shards that are assigned now: the one that was read last, or any if the
        source can be read anywhere."""

    def assign_shards(self, shards: Sequence[int]) -> None:
        """Read these shards from the next step on that is asked for."""

    def origins(self, shard: int, epoch: int, stop_step: int) -> Iterable[tuple[int, Any]]:
        """Return where the rows of the shard's first `stop_step` steps of pass `epoch` come from: pairs of a
        partition's index and int64 row indices. Empty for sources without partitions. Reads no rows."""


class DatasetFeed:
    """Cuts an `insitu.Dataset` into steps.

    If a strategy has several replicas for each shard of the dataset, a shard's batch is split among them,
    as evenly as can be; the first of them names the rows' origins.
    """

    def __init__(
        self,
        dataset: Dataset,
        shards: Sequence[int],
        num_shards: int,
        launched_shards: Sequence[int] | None = None,
        replicas_per_shard: int = 1,
    ) -> None:
        self._replicas = replicas_per_shard
        wanted = self._of_dataset(shards if launched_shards is None else launched_shards)
        if dataset.num_shards * replicas_per_shard != num_shards or tuple(dataset.shards) != wanted:
            raise TrainingError(
                f"The dataset's shards must be the strategy's: {list(wanted)} of "
                f"{num_shards // replicas_per_shard}. Received: {list(dataset.shards)} of "
                f"{dataset.num_shards}."
            )
        check_global_batch(dataset.batch_size, num_shards)
        self._dataset = dataset
        self._shards = self._of_dataset(shards)
        self._own = frozenset(shards)
        self.source = Source()
        self.part_rows: int | None = -(-dataset.batch_size // num_shards)
        # No ledger accounts for rows that are left out on purpose.
        self.cache: str | None = None if dataset.is_selected else dataset.cache.name

    def __repr__(self) -> str:
        return repr(self._dataset)

    @property
    def follows_epochs(self) -> bool:
        return self._dataset.seed is not None or self._dataset.passes is None

    def skip_epochs(self, count: int) -> None:
        """Do nothing: each epoch is read by its number."""

    @property
    def num_steps(self) -> int | None:
        passes = self._dataset.passes
        return None if passes is None or self.is_refreshed else passes * self._dataset.num_steps

    @property
    def is_refreshed(self) -> bool:
        return self._dataset.is_refreshed

    def count_steps(self, number: int) -> int | None:
        return int(self._dataset.at_epoch(number).num_steps)

    def find_pass(self, epoch: int, step: int) -> tuple[int, int]:
        passes = self._dataset.passes
        if passes == 1:
            return epoch, step
        done, index = divmod(step, self._dataset.num_steps)
        return epoch * (passes or 1) + done, index

    def example(self, rows: int = 1) -> Any:
        self._dataset.refuse_lists()
        return keras.tree.map_structure(
            lambda spec: _first_rows(rows, _zeros((rows, *spec.shape[1:]), spec.dtype)),
            self._dataset.element_spec,
        )

    def begin(self) -> StepReader:
        return self.steps

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        number = start_step
        num_steps = self.count_steps(epoch) if self.is_refreshed else self.num_steps
        while num_steps is None or number < num_steps:
            index, step = self.find_pass(epoch, number)
            own, streams = self._own, [self._dataset.shard_batches(s, index, step) for s in self._shards]
            last = self.count_steps(index)
            for batches in zip(*streams, strict=True):
                step, number = step + 1, number + 1
                yield self._join(index, batches, last=step == last)
                if self._own is not own:
                    break

    def _join(self, epoch: int, batches: Sequence[Batch], *, last: bool) -> StepBatch:
        own = self._own
        parts = [
            part
            for shard, batch in zip(self._shards, batches, strict=True)
            for part in self._split(shard, batch)
            if part.shard in own
        ]
        return StepBatch(epoch, tuple(parts), last=last)

    def step_at(self, epoch: int, step: int) -> StepBatch:
        return next(self.steps(epoch, step))

    def _split(self, shard: int, batch: Batch) -> list[ShardBatch]:
        replicas = self._replicas
        if replicas == 1:
            of = self._dataset.num_shards
            return [ShardBatch(shard, batch.rows, batch.data, batch.origins, dataset_shards=of)]
        return [
            _slice(batch.data, batch.rows, index, replicas, shard * replicas + index, batch.origins)
            for index in range(replicas)
        ]

    def assign_shards(self, shards: Sequence[int]) -> None:
        self._shards = self._of_dataset(shards)
        self._own = frozenset(shards)

    def _of_dataset(self, shards: Sequence[int]) -> tuple[int, ...]:
        """Return the dataset's shards that the replicas `shards` of a strategy take their rows from."""
        return tuple(dict.fromkeys(shard // self._replicas for shard in shards))

    def origins(self, shard: int, epoch: int, stop_step: int) -> Iterable[tuple[int, Any]]:
        return self._dataset.shard_origins(shard, epoch, stop_step)


class StreamFeed:
    """Slices steps out of the global batches of a source, the same in each process.

    `fingerprint` distinguishes global batches: tasks compare its numbers in each step.
    """

    cache: str | None = None
    follows_epochs = False

    def __init__(
        self,
        source: Source,
        shards: Sequence[int],
        num_shards: int,
        batch_size: int | None = None,
        fingerprint: Callable[[Any], int] | None = None,
    ) -> None:
        self.part_rows = -(-batch_size // num_shards) if batch_size else None
        self.source = source
        self._shards = tuple(shards)
        self._num_shards = num_shards
        self._fingerprint = fingerprint
        #: The global batches that were read last, as (epoch, step, batch). Written by `_read`.
        self._recent: deque[tuple[int, int, Any]] = deque(maxlen=_KEPT_BATCHES)

    @property
    def num_steps(self) -> int | None:
        return self.source.num_steps

    @property
    def is_refreshed(self) -> bool:
        return False

    def count_steps(self, number: int) -> int | None:
        return self.num_steps

    def find_pass(self, epoch: int, step: int) -> tuple[int, int]:
        return epoch, step

    def example(self, rows: int = 1) -> Any:
        batch = _as_arrays(self.source.peek())
        if not count_rows(batch):
            raise InputError("A batch must have at least one row. Received: a first batch of none.")
        if self._num_shards > 1:
            _check_rows(batch, count_rows(batch))
        return map_batch(partial(_first_rows, rows), batch)

    def begin(self) -> StepReader:
        read = self.source.begin()
        return lambda epoch, start: self._read(read(epoch, start), epoch, start)

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        self.source.begin_epoch(epoch)
        try:
            yield from self.begin()(epoch, start_step)
        finally:
            self.source.end_epoch()

    def _read(self, batches: Iterator[Any], epoch: int, start: int) -> Iterator[StepBatch]:
        for step, batch in enumerate(batches, start):
            arrays = _as_arrays(batch)
            self._recent.append((epoch, step, arrays))
            yield self._cut(epoch, arrays)

    def _cut(self, epoch: int, batch: Any) -> StepBatch:
        rows = count_rows(batch)
        fingerprint = self._fingerprint(batch) if self._fingerprint is not None else 0
        count = self._num_shards
        if count == 1:
            return StepBatch(epoch, (ShardBatch(self._shards[0], rows, batch, (), fingerprint),))
        _check_rows(batch, rows)
        return StepBatch(
            epoch,
            tuple(
                [_slice(batch, rows, shard, count, shard, fingerprint=fingerprint) for shard in self._shards]
            ),
        )

    def skip_epochs(self, count: int) -> None:
        if count < 0 and not self.source.restartable:
            raise InputError(
                f"Data that is read in order goes forward only. Received: a position {-count} epochs back. "
                "Use an insitu.Dataset or arrays, or distribute the data again."
            )
        if count > 0:
            self.source.replay_epochs(count)
            self.source.skip(count)

    def step_at(self, epoch: int, step: int) -> StepBatch:
        for kept_epoch, kept_step, batch in self._recent:
            if (kept_epoch, kept_step) == (epoch, step):
                return self._cut(epoch, batch)
        if not self.source.restartable:
            raise TrainingError(
                f"Data that is read in order can be cut again where it is. Received: step {step} of epoch "
                f"{epoch}, which isn't the last one. Start the job again."
            )
        return next(self.steps(epoch, step))

    def assign_shards(self, shards: Sequence[int]) -> None:
        self._shards = tuple(shards)

    def origins(self, shard: int, epoch: int, stop_step: int) -> Iterable[tuple[int, Any]]:
        return ()


def check_global_batch(rows: int, replicas: int) -> None:
    """Raise InputError if a whole batch of `rows` rows of an `insitu.Dataset` leaves replicas without
    any."""
    if rows < replicas:
        raise InputError(
            f"The global batch must have at least one row for each of the {replicas} replicas. Received: a "
            f"batch of {rows}. Make the batches larger, or use fewer workers or devices."
        )


def _check_rows(batch: Any, rows: int) -> None:
    """Raise InputError unless all arrays of a batch have this number of rows."""
    leaves = flatten_batch(batch)
    if all(leaf.shape[:1] == (rows,) for leaf in leaves):
        return
    shapes = ", ".join(str(leaf.shape) for leaf in leaves)
    raise InputError(
        "With several replicas each takes its rows of every array of a batch, so all arrays must have as "
        f"many rows. Received: a batch with arrays of the shapes {shapes}. Repeat what all rows share for "
        "each of them, or train on one device."
    )


def _slice(
    data: Any, rows: int, index: int, count: int, shard: int, origins: Any = (), *, fingerprint: int = 0
) -> ShardBatch:
    """Return part `index` of `count` of a batch, for `shard`; the first has the origins of all rows."""
    start, stop = (rows * i // count for i in (index, index + 1))
    origins = origins if index == 0 else ()
    if start == stop:
        return ShardBatch(shard, 0, None, origins, fingerprint)
    return ShardBatch(
        shard, stop - start, map_batch(itemgetter(slice(start, stop)), data), origins, fingerprint
    )


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return an array of zeros; of empty texts for text."""
    return np.full(shape, "", object) if dtype.hasobject else np.zeros(shape, dtype)


def _first_rows(rows: int, leaf: Any) -> Any:
    if leaf.dtype.hasobject or leaf.dtype.kind in "SU":
        # Keras knows strings as tensors only.
        return keras.ops.convert_to_tensor(leaf[:rows], dtype="string")
    return leaf[:rows]


def _as_arrays(batch: Any) -> Any:
    return map_batch(_as_array, batch)


def _as_array(leaf: Any) -> Any:
    if type(leaf) is np.ndarray:
        return leaf
    if data_adapter_utils.is_tensorflow_ragged(leaf):
        refuse_ragged()
    if data_adapter_utils.is_scipy_sparse(leaf):
        return leaf.toarray()
    if data_adapter_utils.is_jax_sparse(leaf):
        return np.asarray(leaf.todense())
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        # By this backend: others make an array of one object of it.
        from keras.src.backend.tensorflow.core import convert_to_numpy

        return convert_to_numpy(leaf)
    if data_adapter_utils.is_torch_tensor(leaf):
        return keras.ops.convert_to_numpy(leaf)
    return np.asarray(leaf)


def weigh_classes(batch: Any, class_weight: dict[int, float]) -> Any:
    """Return `(x, y)` with a third member: the weight of each row's class."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    if not isinstance(batch, tuple) or len(batch) != 2:
        raise InputError(
            "class_weight needs batches of (x, y), without sample weights. "
            f"Received: {type(batch).__name__} of {len(batch)}."
        )
    x, y = batch
    return x, y, data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
