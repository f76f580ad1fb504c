"""Cuts data into steps: for each shard of this task, its rows of the step's global batch.

Two kinds of source. An `insitu.Dataset` gives each shard its own rows. Anything else that Keras takes
(arrays, tf.data, PyDataset, generators) is a stream of *global* batches, the same in each process, of which
each shard takes its slice. In both, every row enters the model once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol

import keras
import numpy as np

from insitu.errors import InputError, TrainingError
from insitu.grid import Batch, Dataset
from insitu.train.replica import ShardBatch, StepBatch, count_rows, map_batch


class Feed(Protocol):
    """A source of steps."""

    #: Steps in an epoch; None where that isn't known before the data has been read.
    num_steps: int | None
    #: The name of the cache that the rows come from; None for other sources.
    cache: str | None
    #: The most rows that one shard has in a step; None where it isn't known.
    part_rows: int | None

    def example(self) -> Any:
        """Return a batch of at least one row that shows structure, dtypes and shapes."""

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        """Yield the steps of `epoch` from `start_step` on."""

    def assign_shards(self, shards: Sequence[int]) -> None:
        """Read these shards from now on. Iterators that were made before keep theirs."""

    def origins(self, shard: int, epoch: int, stop_step: int) -> tuple[tuple[int, Any], ...]:
        """Return where the rows of the shard's first `stop_step` steps of `epoch` come from: pairs of a
        partition's index and int64 row indices. Empty for sources without partitions. Reads no rows."""


class DatasetFeed:
    """Cuts an `insitu.Dataset` into steps.

    Where a strategy has several replicas for each shard of the dataset, a shard's batch is split among them,
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
        self.num_steps: int | None = dataset.num_steps
        self.part_rows: int | None = -(-dataset.batch_size // num_shards)
        self.cache: str | None = dataset.cache.name

    def example(self) -> Any:
        return keras.tree.map_structure(
            lambda spec: np.zeros((1, *spec.shape[1:]), spec.dtype), self._dataset.element_spec
        )

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        shards, own = self._shards, self._own
        streams = [self._dataset.shard_batches(s, epoch, start_step) for s in shards]
        for index, batches in enumerate(zip(*streams, strict=True), start_step):
            parts = [
                part
                for shard, batch in zip(shards, batches, strict=True)
                for part in self._split(shard, batch)
                if part.shard in own
            ]
            yield StepBatch(epoch, tuple(parts), last=index + 1 == self.num_steps)

    def _split(self, shard: int, batch: Batch) -> list[ShardBatch]:
        replicas = self._replicas
        if replicas == 1:
            return [ShardBatch(shard, batch.rows, batch.data, batch.origins)]
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

    def origins(self, shard: int, epoch: int, stop_step: int) -> tuple[tuple[int, Any], ...]:
        return self._dataset.shard_origins(shard, epoch, stop_step)


class StreamFeed:
    """Slices steps out of global batches. `batches(epoch)` gives them, the same in each process."""

    cache: str | None = None

    def __init__(
        self,
        batches: Callable[[int], Iterator[Any]],
        num_steps: int | None,
        shards: Sequence[int],
        num_shards: int,
        batch_size: int | None = None,
    ) -> None:
        self.part_rows = -(-batch_size // num_shards) if batch_size else None
        self._batches = batches
        self._shards = tuple(shards)
        self._num_shards = num_shards
        self.num_steps = num_steps

    def example(self) -> Any:
        batches = iter(self._batches(0))
        batch = next(batches, None)
        if batch is None:
            raise InputError("The data must have at least one batch. Received: none.")
        arrays = _as_arrays(batch)
        rows = count_rows(arrays)
        # A last batch may have fewer rows than there are replicas.
        if rows < self._num_shards and next(batches, None) is not None:
            check_global_batch(rows, self._num_shards)
        return keras.tree.map_structure(lambda leaf: leaf[:1], arrays)

    def steps(self, epoch: int, start_step: int) -> Iterator[StepBatch]:
        shards = self._shards
        for index, batch in enumerate(self._batches(epoch)):
            if index >= start_step:
                arrays = _as_arrays(batch)
                rows = count_rows(arrays)
                yield StepBatch(epoch, tuple([self._part(shard, arrays, rows) for shard in shards]))

    def assign_shards(self, shards: Sequence[int]) -> None:
        self._shards = tuple(shards)

    def origins(self, shard: int, epoch: int, stop_step: int) -> tuple[tuple[int, Any], ...]:
        return ()

    def _part(self, shard: int, batch: Any, rows: int) -> ShardBatch:
        if self._num_shards == 1:
            return ShardBatch(shard, rows, batch)
        return _slice(batch, rows, shard, self._num_shards, shard)


def check_global_batch(rows: int, replicas: int) -> None:
    """Raise InputError where a whole batch of `rows` rows leaves replicas without any."""
    if rows < replicas:
        raise InputError(
            f"The global batch must have at least one row for each of the {replicas} replicas. Received: a "
            f"batch of {rows}. Make the batches larger, or use fewer workers or devices."
        )


def _slice(data: Any, rows: int, index: int, count: int, shard: int, origins: Any = ()) -> ShardBatch:
    """Return part `index` of `count` of a batch, for `shard`; the first has the origins of all rows."""
    start, stop = (rows * i // count for i in (index, index + 1))
    origins = origins if index == 0 else ()
    if start == stop:
        return ShardBatch(shard, 0, None, origins)
    return ShardBatch(shard, stop - start, map_batch(itemgetter(slice(start, stop)), data), origins)


def _as_arrays(batch: Any) -> Any:
    return map_batch(_as_array, batch)


def _as_array(leaf: Any) -> Any:
    return leaf if type(leaf) is np.ndarray else keras.ops.convert_to_numpy(leaf)


@dataclass(frozen=True, slots=True)
class ArraySource:
    """Cuts arrays of equal length into global batches, each epoch in an order of its own when shuffled.

    `data` is a structure of NumPy arrays; the order is a pure function of (seed, epoch).
    """

    #: A structure of arrays with the rows as their first axis.
    data: Any
    #: Rows of a global batch.
    batch_size: int
    #: Whether each epoch has an order of its own.
    shuffle: bool
    #: The seed of these orders.
    seed: int
    #: Rows of each array; set from `data`.
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = {len(leaf) for leaf in keras.tree.flatten(self.data)}
        if len(lengths) != 1 or not lengths.isdisjoint({0}):
            raise InputError(
                "All arrays must have the same number of rows, at least one. "
                f"Received: {sorted(lengths)} rows."
            )
        object.__setattr__(self, "rows", lengths.pop())

    @property
    def num_steps(self) -> int:
        return -(-self.rows // self.batch_size)

    def __call__(self, epoch: int) -> Iterator[Any]:
        order = None
        if self.shuffle:
            order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.rows)
        for start in range(0, self.rows, self.batch_size):
            rows: Any = slice(start, start + self.batch_size)
            if order is not None:
                rows = order[rows]
            yield map_batch(itemgetter(rows), self.data)


def with_class_weight(batches: Callable[[int], Iterator[Any]], class_weight: dict[int, float]) -> Any:
    """Return `batches`, each row weighted by the class of its label."""

    def weighted(epoch: int) -> Iterator[Any]:
        for batch in batches(epoch):
            yield weigh_classes(batch, class_weight)

    return weighted


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
