"""Makes a tf.data.Dataset of a dataset of insitu's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from insitu.grid import Dataset, map_leaves


def to_tf_dataset(dataset: Dataset) -> Any:
    """Return this task's batches as a tf.data.Dataset, each iteration of which is the next epoch."""
    import tensorflow as tf

    dataset.refuse_lists()

    def spec(leaf: Any) -> Any:
        dtype = tf.string if leaf.dtype.hasobject or leaf.dtype.kind in "SU" else leaf.dtype
        return tf.TensorSpec(leaf.shape, dtype)

    def batches() -> Iterator[Any]:
        yield from dataset

    made = tf.data.Dataset.from_generator(batches, output_signature=map_leaves(spec, dataset.element_spec))
    passes = dataset.passes
    length = tf.data.INFINITE_CARDINALITY if passes is None else passes * dataset.own_steps
    found = made.apply(tf.data.experimental.assert_cardinality(length))
    found._insitu_shards = (len(dataset.shards), dataset.num_shards)
    return found


def find_shards_of(data: Any) -> tuple[int, int] | None:
    """Return (how many shards' rows there are, of how many) if data comes from an `insitu.dataset` as a
    tf.data.Dataset, by any transformations; else None."""
    shards: tuple[int, int] | None = getattr(data, "_insitu_shards", None)
    inputs = getattr(data, "_inputs", None)
    if shards is not None or not callable(inputs):
        return shards
    return next((found for each in inputs() if (found := find_shards_of(each)) is not None), None)
