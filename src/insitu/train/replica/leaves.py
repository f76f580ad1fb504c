"""The arrays of a batch. Nearly every batch is a tuple of arrays: a fast path spares it the walk through the
structure, which takes longer than a small model's whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from insitu.train.collectives import pack_leaves


def flatten_batch(data: Any) -> list[Any]:
    """Return the leaves of `data` in the order of `keras.tree.flatten`, without optional inputs that are
    None."""
    if _is_flat(data):
        return list(data)
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def pack_batch(structure: Any, leaves: Iterable[Any]) -> Any:
    """Return what `flatten_batch` made `leaves` of, a batch of this structure."""
    if _is_flat(structure):
        return tuple(leaves)
    remaining = iter(leaves)
    filled = [None if leaf is None else next(remaining) for leaf in keras.tree.flatten(structure)]
    return pack_leaves(structure, filled)


def flatten_to_numpy(data: Any) -> list[Any]:
    """Return the leaves of `data` as NumPy arrays."""
    return [np.asarray(leaf) for leaf in flatten_batch(data)]


def map_batch(function: Callable[[Any], Any], data: Any) -> Any:
    """Return the structure of `data` with `function` applied to each leaf but None."""
    if _is_flat(data):
        return tuple([function(leaf) for leaf in data])
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), data)


def count_rows(data: Any) -> int:
    """Return the number of rows of a batch; 0 if all is None."""
    leaves = flatten_batch(data)
    return len(leaves[0]) if leaves else 0


def _is_flat(data: Any) -> bool:
    if type(data) is not tuple or not data:
        return False
    # A generator for all() would take three times as long.
    for leaf in data:  # noqa: SIM110
        if type(leaf) is not np.ndarray:
            return False
    return True
