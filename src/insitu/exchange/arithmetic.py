"""Pure: the one order of summation, and how a buffer is cut into parts.

Every transport reduces with `Reducer`, part by part, so that the result has the same bits whatever the
transport, the number of processes, the cuts and the timing: each element is
`((x_0 + x_1) + x_2) + ...` in shard order, in the buffer's own dtype. float16 and bfloat16 are the
exception: they are accumulated in float32 and rounded once, at the end. What overflows or isn't a number
becomes so quietly, whatever NumPy is told to do about it: half a group can't stop in the midst of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from insitu.errors import InputError

Array = np.ndarray
ReduceOp = Literal["sum", "mean", "weighted_mean"]
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)

Factors = Sequence[np.generic]

NARROW = ("float16", "bfloat16")
"""Accumulated in float32."""
FLOATING = ("float32", "float64", *NARROW)
DTYPES = (*FLOATING, "int32", "int64")
PAGE = 4096
_FLOAT32 = np.dtype(np.float32)


def check_reducible(dtype: np.dtype, op: str) -> None:
    """Raises InputError unless buffers of `dtype` can be reduced by `op`."""
    if op not in REDUCE_OPS:
        raise InputError(f"op must be one of {', '.join(REDUCE_OPS)}. Received: {op!r}")
    if dtype.name not in DTYPES:
        raise InputError(f"A buffer to reduce must be of {', '.join(DTYPES)}. Received: {dtype.name}")
    if op != "sum" and dtype.name not in FLOATING:
        raise InputError(f"A {op} needs a floating dtype, since it divides. Received: {dtype.name}")


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype in which buffers of `dtype` are summed."""
    return _FLOAT32 if dtype.name in NARROW else dtype


def coefficients(weights: Sequence[float], dtype: np.dtype) -> list[np.generic] | None:
    """What each shard is multiplied with in a weighted mean: w_s / W, computed in float64, then rounded to
    the dtype of summation. W is the exact sum, rounded once. None where all weights are 0."""
    try:
        total = math.fsum(weights)
    except OverflowError:  # a power of two changes none of the quotients
        return coefficients([weight * 2.0**-64 for weight in weights], dtype)
    if total == 0.0:
        return None
    kind = accumulator(dtype).type
    return [kind(weight / total) for weight in weights]


def check_weights(weights: Sequence[float], count: int) -> list[float]:
    """`weights` as floats. Raises InputError unless there are `count`, finite and not negative."""
    values = [float(weight) for weight in weights]
    if len(values) != count or not all(0.0 <= value < math.inf for value in values):
        raise InputError(
            f"weights must hold one finite number >= 0 for each of the {count} shards hosted here. "
            f"Received: {values}"
        )
    return values


def bounds(length: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """`parts` half-open intervals of elements that cover [0, length) in order.

    Cuts fall on whole pages of memory, so that no cache line is written by two processes; of a buffer smaller
    than `parts` pages, some parts are empty.
    """
    unit = max(1, PAGE // itemsize)
    units = -(-length // unit)
    cuts = [min(length, units * part // parts * unit) for part in range(parts + 1)]
    return list(pairwise(cuts))


def chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """[start, stop) cut into half-open intervals of `size` elements, the last one shorter."""
    return [(low, min(stop, low + size)) for low in range(start, stop, size)]


class Reducer:
    """Reduces rows of one dtype by one operation, always in the order in which they are given.

    `limit` is the greatest length of a row in elements. Holds scratch of its own: not for several threads.
    """

    def __init__(self, op: ReduceOp, dtype: np.dtype, num_shards: int, limit: int) -> None:
        check_reducible(dtype, op)
        self.op = op
        self.dtype = dtype
        self.wide = accumulator(dtype)
        self._divisor = num_shards
        self._limit = limit
        self._spare: Array | None = None
        self._total: Array | None = None

    def reduce(self, rows: Sequence[Array], out: Array, factors: Factors | None = None) -> None:
        """Writes the reduction of `rows` (one per shard, in shard order) to `out`.

        `out` may be the first of the rows, none of the others. `factors` come from `coefficients`; a row
        whose factor is 0 is not read. At least one factor is not 0.
        """
        if self.wide is not self.dtype:
            if self._total is None:
                self._total = np.empty(self._limit, self.wide)
            total = self._total[: len(out)]
        else:
            total = out
        self.extend(total, rows, factors, True)
        self.finish(total, out)

    def bind(self, rows: Sequence[Array], out: Array) -> Callable[[Factors | None], None]:
        """`reduce` of these rows to this `out`, which is none of them, to be called many times for small
        arrays: a plain sum costs nothing but its additions."""
        if self.op != "sum" or self.wide is not self.dtype or len(rows) < 2:
            return partial(self.reduce, rows, out)
        first, second, *rest = rows

        def reduce(factors: Factors | None) -> None:
            with np.errstate(all="ignore"):
                np.add(first, second, out)
                for row in rest:
                    np.add(out, row, out)

        return reduce

    def extend(self, total: Array, rows: Sequence[Array], factors: Factors | None, fresh: bool) -> bool:
        """Adds `rows` to `total`, which holds the sum of all rows before, in the dtype of summation, or
        nothing yet where `fresh`. Returns whether it still holds nothing."""
        with np.errstate(all="ignore"):
            if factors is not None:
                return self._weighted(total, rows, factors, fresh)
            if not rows:
                return fresh
            if self.wide is not self.dtype:
                return self._narrow(total, rows, fresh)
            return self._plain(total, rows, fresh)

    def finish(self, total: Array, out: Array) -> None:
        """Turns the sum of all rows into the result."""
        with np.errstate(all="ignore"):
            if self.op == "mean":
                np.true_divide(total, self._divisor, total)
            if out is not total:
                np.copyto(out, total, casting="unsafe")

    def _plain(self, total: Array, rows: Sequence[Array], fresh: bool) -> bool:
        if fresh and len(rows) == 1:
            if rows[0] is not total:
                np.copyto(total, rows[0])
            return False
        rest = rows
        if fresh:
            np.add(rows[0], rows[1], total)
            rest = rows[2:]
        for row in rest:
            np.add(total, row, total)
        return False

    def _scratch(self, length: int) -> Array:
        if self._spare is None:
            self._spare = np.empty(self._limit, self.wide)
        return self._spare[:length]

    def _narrow(self, total: Array, rows: Sequence[Array], fresh: bool) -> bool:
        spare = self._scratch(len(total))
        if fresh:
            np.copyto(total, rows[0], casting="unsafe")
        for row in rows[1:] if fresh else rows:
            np.copyto(spare, row, casting="unsafe")
            np.add(total, spare, total)
        return False

    def _weighted(self, total: Array, rows: Sequence[Array], factors: Factors, fresh: bool) -> bool:
        spare = self._scratch(len(total))
        for row, factor in zip(rows, factors, strict=True):
            if factor == 0:
                continue
            np.multiply(row, factor, total if fresh else spare, dtype=self.wide)
            if not fresh:
                np.add(total, spare, total)
            fresh = False
        return fresh
