"""Make rows like those of a model's data, the same in each process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from insitu.train.collectives import pack_leaves
from insitu.train.replica.leaves import map_batch

WHOLE = 5
"""Rows of the whole batch."""
PARTS = (slice(0, 2), slice(2, 5))
"""The rows of its two parts, which differ in number."""


def make_rows(example: Any, *, lowest: int) -> Any | None:
    """Return `WHOLE` rows like those of `example`, or None for data of other kinds than numbers.

    Floating values lie in (0, 1), labels are 0 or 1, other integers `lowest` or one more. The parts differ in
    their means: a loss over the whole batch, such as a ratio of sums, gives the same where they are alike.
    """
    rng = np.random.default_rng(20_26)
    inputs = example[0] if isinstance(example, tuple) else example
    count = len(keras.tree.flatten(inputs))
    leaves = keras.tree.flatten(example)
    made = [_make(rng, leaf, lowest if index < count else 0) for index, leaf in enumerate(leaves)]
    if any(each is None for each in made):
        return None
    return pack_leaves(example, made)


def _make(rng: np.random.Generator, leaf: Any, lowest: int) -> Any:
    array = np.asarray(leaf)
    shape, kind = (WHOLE, *array.shape[1:]), array.dtype.kind
    if kind in "iu":
        return _skewed(rng.integers(0, 2, shape), lowest).astype(array.dtype)
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "f" or "float" in array.dtype.name:
        values = rng.uniform(0.05, 0.95, shape) / 2
        values[PARTS[1]] += 0.5
        return values.astype(array.dtype)
    return None


def _skewed(bits: Any, lowest: int) -> Any:
    """Return integers of 0 or 1, plus `lowest`, of which the first part has a 0 and the second a 1."""
    bits[PARTS[0].start], bits[PARTS[1].start] = 0, 1
    return bits + lowest


def cut(rows: Any, part: slice) -> Any:
    """Return some of the rows."""
    return map_batch(lambda leaf: leaf[part], rows)


def double(rows: Any) -> Any:
    """Return all rows twice."""
    return map_batch(lambda leaf: np.concatenate([leaf, leaf]), rows)


def make_value(variable: Any, index: int) -> Any:
    """Return a value for a variable in which each step begins that is probed: of positive numbers near 1, or
    for a matrix of both signs and about the size of usual initial values."""
    shape = tuple(variable.shape)
    rng = np.random.default_rng([20_26, index])
    if len(shape) < 2:
        return rng.uniform(0.25, 0.75, shape)
    fan_in = max(1, int(np.prod(shape[:-1])))
    return rng.uniform(-1, 1, shape) * np.sqrt(3.0 / fan_in)
