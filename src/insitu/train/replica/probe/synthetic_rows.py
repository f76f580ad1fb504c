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
SAMPLE_ROWS = 64
"""Rows of the data that an example holds, if there are so many: some of them are probed too."""
_MARK = -1
"""The label that most often says that a row, or an entry of it, has none."""


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


def take_rows(example: Any) -> Any | None:
    """Return `WHOLE` of the rows of `example`, or None where it has one row or shows nothing but zeros.

    They are far apart in their labels: the first part has the lowest, the second the highest. So the parts
    differ in what a loss leaves out by value.
    """
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(example) if leaf is not None]
    labels = [np.asarray(leaf) for leaf in keras.tree.flatten(_labels(example)) if leaf is not None]
    if not leaves or len(leaves[0]) < 2 or not any(_numbers(leaf).any() for leaf in labels):
        return None
    count = len(leaves[0])
    means = [_numbers(leaf).reshape(count, -1).mean(axis=1) for leaf in labels]
    order = np.argsort(np.sum(means, axis=0), kind="stable")
    picked = order[[0, count // 2, count // 4, 3 * count // 4, count - 1]]
    return map_batch(lambda leaf: np.asarray(leaf)[picked], example)


def mark_row(rows: Any) -> Any | None:
    """Return `rows` of which the first has no label, by the usual sign for it; None without labels."""
    if not isinstance(rows, tuple) or len(rows) < 2 or rows[1] is None:
        return None
    return (rows[0], map_batch(_mark_first, rows[1]), *rows[2:])


def _mark_first(leaf: Any) -> Any:
    marked = np.array(leaf)
    if marked.dtype.kind in "if":
        marked[0] = _MARK
    return marked


def _labels(example: Any) -> Any:
    return example[1] if isinstance(example, tuple) and len(example) > 1 else example


def _numbers(leaf: Any) -> Any:
    """Return an array in which what is no number is lower than all others."""
    return np.nan_to_num(leaf.astype(np.float64), nan=-1e9)


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
