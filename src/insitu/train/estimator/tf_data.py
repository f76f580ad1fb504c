"""Transform the batches of a tf.data.Dataset by NumPy, before the graph of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError


def map_batches(dataset: Any, transform: Callable[..., Any]) -> Any:
    """Return a tf.data.Dataset of what `transform` makes of each batch, given as NumPy arrays. The first
    batch says which arrays these are: dtypes, numbers of axes, and the lengths of the third axis and those
    behind it. The second axis has any length, or has a length of 1 in all batches.

    Raises InputError for batches that aren't dense tensors, or where there is none. A batch whose arrays are
    others raises it when it is read.
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
    shapes = [_find_shape(array) for array in arrays]

    def run(*leaves: Any) -> list[Any]:
        found = [np.asarray(a) for a in tf.nest.flatten(apply(tf.nest.pack_sequence_as(spec, leaves)))]
        for array, shape in zip(found, shapes, strict=True):
            _check_shape(array, shape)
        return [array.astype(like.dtype) for array, like in zip(found, arrays, strict=True)]

    def in_graph(*batch: Any) -> Any:
        leaves = tf.numpy_function(run, tf.nest.flatten(batch), [array.dtype for array in arrays])
        for leaf, shape in zip(leaves, shapes, strict=True):
            leaf.set_shape(shape)
        return tf.nest.pack_sequence_as(made, leaves)

    return dataset.map(in_graph)


def _find_shape(first: NDArray[Any]) -> list[int | None]:
    """Return the shape of an array in all batches; None: any length."""
    columns = 1 if first.shape[1:2] == (1,) else None
    return [None, columns, *first.shape[2:]][: first.ndim]


def _check_shape(array: NDArray[Any], shape: list[int | None]) -> None:
    lengths = zip(array.shape, shape, strict=False)
    if array.ndim != len(shape) or any(wanted not in (None, length) for length, wanted in lengths):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise InputError(
            f"The batches of a tf.data.Dataset have arrays of the shapes of the first one: ({wanted}). "
            f"Received: {array.shape}. Fill rows up to one length, as by padded_batch with padded_shapes"
        )
