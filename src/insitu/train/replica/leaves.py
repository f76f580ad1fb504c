"""The arrays of a batch. Nearly every batch is a tuple of arrays: a fast path spares it the walk through the
structure, which takes longer than a small model's whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def flatten_batch(data: Any) -> list[Any]:
    """Return the leaves of `data` in the order of `keras.tree.flatten`."""
    if _is_flat(data):
        return list(data)
    leaves: list[Any] = keras.tree.flatten(data)
    return leaves


def flatten_to_numpy(data: Any) -> list[Any]:
    """Return the leaves of `data` as NumPy arrays."""
    return [np.asarray(leaf) for leaf in flatten_batch(data)]


def map_batch(function: Callable[[Any], Any], data: Any) -> Any:
    """Return the structure of `data` with `function` applied to each leaf."""
    if _is_flat(data):
        return tuple([function(leaf) for leaf in data])
    return keras.tree.map_structure(function, data)


def count_rows(data: Any) -> int:
    return len(data[0]) if _is_flat(data) else len(keras.tree.flatten(data)[0])


def _is_flat(data: Any) -> bool:
    if type(data) is not tuple or not data:
        return False
    # A generator for all() would take three times as long.
    for leaf in data:  # noqa: SIM110
        if type(leaf) is not np.ndarray:
            return False
    return True
