"""Transform the batches of a tf.data.Dataset by NumPy, before the graph of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from insitu.errors import InputError


def map_batches(dataset: Any, transform: Callable[..., Any]) -> Any:
    """Return a tf.data.Dataset of what `transform` makes of each batch, given as NumPy arrays. The first
    batch says which arrays these are: dtypes, numbers of axes, and the lengths but those of the first two.

    Raises InputError for batches that aren't dense tensors, or where there is none.
    """
    import tensorflow as tf

    spec = dataset.element_spec
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec):
            raise InputError(
                "A tf.data.Dataset for a canned estimator has dense tensors. Received: "
                f"{type(leaf).__name__}. Fill its rows up by to_tensor or padded_batch, or return an "
                "insitu.Dataset"
            )
    first = next(iter(dataset.take(1)), None)
    if first is None:
        raise InputError("An input_fn returns data with a row at least. Received: an empty tf.data.Dataset")

    def apply(batch: Any) -> Any:
        return transform(*batch) if isinstance(batch, tuple) else transform(batch)

    made = apply(tf.nest.map_structure(lambda tensor: tensor.numpy(), first))
    arrays = [np.asarray(array) for array in tf.nest.flatten(made)]

    def run(*leaves: Any) -> list[Any]:
        found = tf.nest.flatten(apply(tf.nest.pack_sequence_as(spec, leaves)))
        return [np.asarray(array).astype(like.dtype) for array, like in zip(found, arrays, strict=True)]

    def in_graph(*batch: Any) -> Any:
        leaves = tf.numpy_function(run, tf.nest.flatten(batch), [array.dtype for array in arrays])
        for leaf, like in zip(leaves, arrays, strict=True):
            leaf.set_shape(
                [None, None, *like.shape[2:]][: like.ndim] if like.shape[1:2] != (1,) else [None, 1]
            )
        return tf.nest.pack_sequence_as(made, leaves)

    return dataset.map(in_graph)
