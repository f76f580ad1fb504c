"""Pure: the one order of summation, and how a buffer is cut into parts.

Every transport reduces with `Reducer`, part by part, so that the result has the same bits whatever the
transport, the number of processes, the cuts and the timing: each element is
`((x_0 + x_1) + x_2) + ...` in shard order, in the buffer's own dtype. float16 and bfloat16 are the
exception: they are accumulated in float32 and rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from insitu.errors import InputError

Array = np.ndarray
Operation = Literal["sum", "mean", "weighted_mean"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

NARROW = ("float16", "bfloat16")
"""Accumulated in float32."""
FLOATING = ("float32", "float64", *NARROW)
DTYPES = (*FLOATING, "int32", "int64")
PAGE = 4096


def check_reducible(dtype: np.dtype, op: str) -> None:
    """Raises InputError unless buffers of `dtype` can be reduced by `op`."""
    if op not in OPERATIONS:
        raise InputError(f"op must be one of {', '.join(OPERATIONS)}. Received: {op!r}")
    if dtype.name not in DTYPES:
        raise InputError(f"A buffer to reduce must be of {', '.join(DTYPES)}. Received: {dtype.name}")
    if op != "sum" and dtype.name not in FLOATING:
        raise InputError(f"A {op} needs a floating dtype, since it divides. Received: {dtype.name}")


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype in which buffers of `dtype` are summed."""
    return np.dtype(np.float32) if dtype.name in NARROW else dtype


def coefficients(weights: Sequence[float], dtype: np.dtype) -> list[np.generic] | None:
    """What each shard is multiplied with in a weighted mean: w_s / W, computed in float64, then rounded to
    the dtype of summation. W is the exact sum, rounded once. None where all weights are 0."""
    total = math.fsum(weights)
    if total == 0.0:
        return None
    kind = accumulator(dtype).type
    return [kind(weight / total) for weight in weights]


def check_weights(weights: Sequence[float], count: int) -> list[float]:
    """`weights` as floats. Raises InputError unless there are `count`, finite and not negative."""
    values = [float(weight) for weight in weights]
    if len(values) != count or not all(0.0 <= value < math.inf for value in values):
        raise InputError(
            f"weights must hold one finite number >= 0 for each of the {count} shards that this process hosts. "
            f"Received: {values}"
        )
    return values


def bounds(length: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """`parts` half-open intervals of elements that cover [0, length) in order.

    Cuts fall on whole pages of memory, so that no cache line is written by two processes; a buffer smaller
    than `parts` pages leaves the last parts empty.
    """
    unit = max(1, PAGE // itemsize)
    units = -(-length // unit)
    cuts = [min(length, units * part // parts * unit) for part in range(parts + 1)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """[start, stop) cut into half-open intervals of `size` elements, the last one shorter."""
    return [(low, min(stop, low + size)) for low in range(start, stop, size)]


class Reducer:
    """Reduces rows of one dtype by one operation, always in the order in which they are given.

    `limit` is the greatest length of a row in elements. Holds scratch of its own: not for several threads.
    """

    def __init__(self, op: Operation, dtype: np.dtype, num_shards: int, limit: int) -> None:
        check_reducible(dtype, op)
        self.op = op
        self.dtype = dtype
        self._divisor = num_shards
        self._wide = accumulator(dtype) != dtype
        self._limit = limit
        self._spare: Array | None = None
        self._sum: Array | None = None

    def reduce(self, rows: Sequence[Array], out: Array, factors: Sequence[np.generic] | None = None) -> None:
        """Writes the reduction of `rows` (one per shard, in shard order) to `out`.

        `out` may be the first of the rows, none of the others. `factors` come from `coefficients`; a row
        whose factor is 0 is not read. At least one factor is not 0.
        """
        if self.op == "weighted_mean":
            if factors is None:
                raise InputError("A weighted_mean needs weights")
            pairs = [(row, factor) for row, factor in zip(rows, factors, strict=True) if factor != 0]
            self._weighted(pairs, out)
        elif self._wide:
            self._narrow(rows, out)
        else:
            self._plain(rows, out)

    def _scratch(self, length: int) -> tuple[Array, Array]:
        if self._spare is None or self._sum is None:
            kind = accumulator(self.dtype)
            self._spare = np.empty(self._limit, kind)
            self._sum = np.empty(self._limit, kind)
        return self._spare[:length], self._sum[:length]

    def _plain(self, rows: Sequence[Array], out: Array) -> None:
        if len(rows) == 1:
            if rows[0] is not out:
                np.copyto(out, rows[0])
        else:
            np.add(rows[0], rows[1], out)
            for row in rows[2:]:
                np.add(out, row, out)
        if self.op == "mean":
            np.true_divide(out, self._divisor, out)

    def _narrow(self, rows: Sequence[Array], out: Array) -> None:
        spare, total = self._scratch(len(out))
        np.copyto(total, rows[0], casting="unsafe")
        for row in rows[1:]:
            np.copyto(spare, row, casting="unsafe")
            np.add(total, spare, total)
        if self.op == "mean":
            np.true_divide(total, self._divisor, total)
        np.copyto(out, total, casting="unsafe")

    def _weighted(self, pairs: Sequence[tuple[Array, np.generic]], out: Array) -> None:
        spare, total = self._scratch(len(out))
        first, factor = pairs[0]
        target = total if self._wide else out
        np.multiply(first, factor, target, dtype=target.dtype)
        for row, factor in pairs[1:]:
            np.multiply(row, factor, spare, dtype=spare.dtype)
            np.add(target, spare, target)
        if self._wide:
            np.copyto(out, target, casting="unsafe")
