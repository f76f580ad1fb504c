"""Makes a feed of whatever a user gives to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter

from insitu.errors import InputError
from insitu.grid import Dataset
from insitu.train.fit.adapter import refuse_beside_dataset
from insitu.train.fit.feed import (
    ArraySource,
    DatasetFeed,
    Feed,
    StreamFeed,
    check_global_batch,
    weigh_classes,
    with_class_weight,
)

DEFAULT_BATCH_SIZE = 32
"""Keras' own default, here of the global batch."""


def make_feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    class_weight: dict[int, float] | None = None,
    shards: Sequence[int],
    num_shards: int,
    replicas_per_shard: int = 1,
    seed: int = 0,
    launched_shards: Sequence[int] | None = None,
) -> Feed:
    """Return a feed over the rows of `x`.

    `batch_size` is that of the global batch. `launched_shards` are those that the script's datasets were made
    for, where the task has others by now.

    Raises InputError for data that can't be cut into the same global batches in each process.
    """
    if isinstance(x, Dataset):
        refuse_beside_dataset(y=y, sample_weight=sample_weight, batch_size=batch_size)
        dataset = x.map(lambda *xy: weigh_classes(xy, class_weight)) if class_weight else x
        return DatasetFeed(dataset, shards, num_shards, launched_shards, replicas_per_shard)
    if array_data_adapter.can_convert_arrays((x, y, sample_weight)):
        data = tuple(_to_numpy(part) for part in (x, y, sample_weight) if part is not None)
        size = batch_size or DEFAULT_BATCH_SIZE
        check_global_batch(size, num_shards)
        source = ArraySource(data, size, shuffle, seed)
        return StreamFeed(_weighted(source, class_weight), source.num_steps, shards, num_shards, size)
    for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise InputError(
                f"Data of type {type(x).__name__} yields whole batches with labels and weights: leave {name} "
                f"out. Received: {name} of type {type(value).__name__}."
            )
    batches, num_steps = _stream(x)
    return StreamFeed(_weighted(batches, class_weight), num_steps, shards, num_shards)


def _weighted(batches: Callable[[int], Iterator[Any]], class_weight: dict[int, float] | None) -> Any:
    return with_class_weight(batches, class_weight) if class_weight else batches


def _to_numpy(part: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: np.asarray(leaf), part)


def _stream(x: Any) -> tuple[Callable[[int], Iterator[Any]], int | None]:
    """Return (global batches of an epoch, their number) of data that comes in batches."""
    if isinstance(x, types.GeneratorType):
        raise InputError(
            "A generator can't be started again for each epoch or after a failure. Received: a generator. "
            "Use an insitu.Dataset, arrays, a tf.data.Dataset or a keras.utils.PyDataset."
        )
    if isinstance(x, keras.utils.PyDataset):
        length = x.num_batches
        if length is None:
            raise InputError("A PyDataset needs a length. Received: num_batches=None. Give it __len__.")
        return (lambda epoch: (x[index] for index in range(length))), length
    if data_adapters.is_tf_dataset(x):
        length = int(x.cardinality())
        return (lambda epoch: x.as_numpy_iterator()), (length if length >= 0 else None)
    if data_adapters.is_torch_dataloader(x):
        return (lambda epoch: iter(x)), len(x)
    raise InputError(
        "A strategy trains on an insitu.Dataset, arrays, a tf.data.Dataset, a keras.utils.PyDataset or a "
        f"torch DataLoader. Received: {type(x).__name__}"
    )
