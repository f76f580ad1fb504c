"""Find the first batch of an input_fn's data, and its features batch by batch."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.train.evaluation import BATCH_SIZE


def find_example(data: Any) -> tuple[Any, Any]:
    """Return (features, labels) of a batch, or what has their shapes and dtypes. Raises TrainingError for a
    generator."""
    if isinstance(data, types.GeneratorType):
        raise TrainingError(
            "Data is read several times. Received: a generator. Return an insitu.Dataset, a tf.data.Dataset, "
            "a keras.utils.PyDataset or arrays from input_fn."
        )
    if hasattr(data, "element_spec"):
        data = data.element_spec
    elif isinstance(data, keras.utils.PyDataset):
        data = data[0]
    elif not isinstance(data, (tuple, dict, np.ndarray)):
        data = next(iter(data))
    if isinstance(data, list):
        data = tuple(data)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    return x, y


def iterate_features(data: Any) -> Iterator[Any]:
    """Yield the features of each batch, once."""
    if isinstance(data, (tuple, dict, np.ndarray)):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        for start in range(0, _count_rows(x), BATCH_SIZE):
            yield _cut_rows(x, start)
        return
    batches = (data[i] for i in range(len(data))) if isinstance(data, keras.utils.PyDataset) else iter(data)
    for batch in batches:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch) if isinstance(batch, list) else batch)
        yield keras.tree.map_structure(_as_array, x)


def _count_rows(x: Any) -> int:
    if not isinstance(x, Mapping):
        return len(keras.tree.flatten(x)[0])
    feature = next(iter(x.values()))
    return len(feature) if isinstance(feature, list) else _count_rows(feature)


def _cut_rows(x: Any, start: int) -> Any:
    """Return a batch of the rows. In a dict a list has rows, such as texts; elsewhere it has inputs."""
    if not isinstance(x, Mapping):
        return keras.tree.map_structure(lambda values: values[start : start + BATCH_SIZE], x)
    return {
        key: values[start : start + BATCH_SIZE] if isinstance(values, list) else _cut_rows(values, start)
        for key, values in x.items()
    }


def _as_array(values: Any) -> NDArray[Any]:
    return values if isinstance(values, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(values))
