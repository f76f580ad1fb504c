"""Makes a feed of whatever a user gives to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from insitu.errors import InputError
from insitu.grid import Dataset
from insitu.train.fit.adapter import refuse_beside_dataset
from insitu.train.fit.arrays import (
    ArraySource,
    DrawnOrder,
    Shuffle,
    count_array_rows,
    count_fit_of,
    default_batch_size,
    to_rows,
)
from insitu.train.fit.data_fingerprint import fingerprint_arrays, fingerprint_batch
from insitu.train.fit.feed import DatasetFeed, Feed, StreamFeed, weigh_classes
from insitu.train.fit.labels import check_labels
from insitu.train.fit.streams import (
    OrderedBatches,
    PyDatasetSource,
    Source,
    StreamSource,
    TensorFlowSource,
    TorchSource,
)


def make_train_feed(model: Any, arguments: dict[str, Any], options: Mapping[str, Any]) -> Feed:
    """Return a feed of the data in the `arguments` of `fit`, which are taken out; part of it goes to
    validation. `options` are those of `make_feed` for this task's shards."""
    split = arguments.pop("validation_split", 0.0)
    data = tuple(arguments.pop(name) for name in ("x", "y", "sample_weight"))
    if split and arguments["validation_data"] is None:
        data, arguments["validation_data"] = array_slicing.train_validation_split(
            data, validation_split=split
        )
    check_labels(model, data[0], "fit")
    return make_feed(
        *data,
        batch_size=arguments.pop("batch_size"),
        steps=arguments["steps_per_epoch"],
        shuffle=arguments.pop("shuffle"),
        class_weight=arguments.pop("class_weight"),
        fit=count_fit_of(model),
        **options,
    )


def make_feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: Shuffle = False,
    class_weight: dict[int, float] | None = None,
    shards: Sequence[int],
    num_shards: int,
    replicas_per_shard: int = 1,
    seed: int = 0,
    fit: int = 0,
    launched_shards: Sequence[int] | None = None,
    several_processes: bool = False,
    may_be_endless: bool = False,
) -> Feed:
    """Return a feed over the rows of `x`.

    `batch_size` is that of the global batch; without it, `steps` divides arrays. `seed` and `fit`, the number
    of the fit, draw the order of arrays. `launched_shards` are those that the script's datasets were made
    for, where the task has others by now. With `several_processes`, steps tell whether all were given the
    same. `may_be_endless` where the caller ends an iteration without a number of steps.

    Raises InputError for data that can't be cut into the same global batches in each process.
    """
    if isinstance(x, Dataset):
        refuse_beside_dataset(y=y, sample_weight=sample_weight, batch_size=batch_size)
        if x.passes is None and steps is None and not may_be_endless:
            raise InputError(
                f"repeat() without a count has no end. Received: {x!r} without a number of steps. Pass "
                "steps_per_epoch to fit, steps to evaluate and predict, or a count to repeat."
            )
        dataset = x.map(lambda *xy: weigh_classes(xy, class_weight)) if class_weight else x
        return DatasetFeed(dataset, shards, num_shards, launched_shards, replicas_per_shard)
    if len(shards) < num_shards and is_never_sharded(x):
        raise InputError(
            "Each process takes its part of each global batch, so it must be given all rows. Received: a "
            "tf.data.Dataset with AutoShardPolicy.OFF, which says that its rows are this process' own. Leave "
            "the policy out and give each process the same data; or use an insitu.Dataset, or a custom loop "
            "over strategy.distribute_datasets_from_function."
        )
    order = DrawnOrder(seed, fit)
    if array_data_adapter.can_convert_arrays((x, y, sample_weight)):
        source = _make_array_source(x, y, sample_weight, batch_size, steps, shuffle, class_weight, order)
        number = fingerprint_arrays(source.leaves, source.order_numbers) if several_processes else 0
        fingerprint = (lambda batch: number) if several_processes else None
        return StreamFeed(source, shards, num_shards, source.batch_size, fingerprint)
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise InputError(
                f"Data of type {type(x).__name__} yields whole batches with labels and weights: leave {name} "
                f"out. Received: {name} of type {type(value).__name__}."
            )
    stream = _make_stream_source(x, class_weight, bool(shuffle), order)
    return StreamFeed(stream, shards, num_shards, None, fingerprint_batch if several_processes else None)


def is_never_sharded(x: Any) -> bool:
    """Return whether `x` is a `tf.data.Dataset` with `AutoShardPolicy.OFF`."""
    if not data_adapters.is_tf_dataset(x):
        return False
    policy: str = x.options().experimental_distribute.auto_shard_policy.name
    return policy == "OFF"


def _make_array_source(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    steps: int | None,
    shuffle: Shuffle,
    class_weight: dict[int, float] | None,
    order: DrawnOrder,
) -> ArraySource:
    shuffle = shuffle if shuffle == "batch" else bool(shuffle)
    rows = count_array_rows((x, y, sample_weight))
    # Keras' own checks, and the weights that it makes out of those of classes.
    packed = ArrayDataAdapter(x, y, sample_weight, class_weight=class_weight)._inputs
    data = to_rows(packed if isinstance(packed, tuple) else (packed,))
    return ArraySource(data, batch_size or default_batch_size(rows, steps), shuffle, order)


def _make_stream_source(
    x: Any, class_weight: dict[int, float] | None, shuffle: bool, order: DrawnOrder
) -> Source:
    """Return the source of data that comes in batches."""
    backend = keras.backend.backend()
    if isinstance(x, keras.utils.PyDataset):
        ordered = OrderedBatches(x, order.generator) if shuffle and x.num_batches is not None else x
        batches = PyDatasetAdapter(ordered, class_weight)
        return PyDatasetSource(batches, ordered, batches.get_numpy_iterator)
    if data_adapters.is_tf_dataset(x):
        dataset = TFDatasetAdapter(x, class_weight)
        eager = backend == "tensorflow"  # as Keras begins an iteration
        start = dataset.get_tf_dataset().__iter__ if eager else dataset.get_numpy_iterator
        return TensorFlowSource(dataset, start, eager=eager)
    if not (data_adapters.is_torch_dataloader(x) or data_adapters.is_grain_dataset(x)) and not isinstance(
        x, types.GeneratorType
    ):
        raise InputError(
            "A strategy trains on an insitu.Dataset, arrays, a tf.data.Dataset, a keras.utils.PyDataset, a "
            f"torch DataLoader, a grain dataset or a generator. Received: {type(x).__name__}"
        )
    if class_weight is not None:
        raise InputError(
            f"class_weight needs arrays, a tf.data.Dataset, a PyDataset or an insitu.Dataset. Received: "
            f"class_weight with a {type(x).__name__}. Yield (x, y, weight of each row)."
        )
    if data_adapters.is_torch_dataloader(x):
        loader, eager = TorchDataLoaderAdapter(x), backend == "torch"
        return TorchSource(loader, x, x.__iter__ if eager else loader.get_numpy_iterator, eager=eager)
    if data_adapters.is_grain_dataset(x):
        grain = GrainDatasetAdapter(x)
        return StreamSource(grain, grain.get_numpy_iterator)
    generator = GeneratorDataAdapter(x)
    return StreamSource(generator, generator.get_numpy_iterator)
