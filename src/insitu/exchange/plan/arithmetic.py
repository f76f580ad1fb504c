"""Pure: the one order of summation, and how a buffer is cut into parts.

Every transport reduces with `Reducer`, part by part, so that the result has the same bits whatever the
transport, the number of processes, the cuts and the timing: each element is `((x_0 + x_1) + x_2) + ...` in
shard order, in the buffer's own dtype. float16 and bfloat16 are the exception: they are accumulated in
float32 and rounded once, at the end. Overflow and invalid operations give
infinity and NaN without a warning, also after `numpy.seterr`: no rank may stop in the middle of a sum. A NaN
that is computed has one pattern, without a sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from insitu.base.errors import InputError

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
    """Raise InputError unless buffers of `dtype` can be reduced by `op`."""
    if op not in REDUCE_OPS:
        raise InputError(f"op must be one of {', '.join(REDUCE_OPS)}. Received: {op!r}")
    if dtype.name not in DTYPES:
        raise InputError(f"A buffer to reduce must be of {', '.join(DTYPES)}. Received: {dtype.name}")
    if op != "sum" and dtype.name not in FLOATING:
        raise InputError(
            f"A {op} divides, so it needs one of {', '.join(FLOATING)}. Received: {dtype.name}. "
            'Convert the buffer, or use op="sum"'
        )


def get_accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which buffers of `dtype` are summed."""
    return _FLOAT32 if dtype.name in NARROW else dtype


def compute_factors(weights: Sequence[float], dtype: np.dtype) -> list[np.generic] | None:
    """Return the factor of each shard in a weighted mean, or None if all weights are 0.

    It is w_s / W, computed in float64, then rounded to the dtype of summation. W is the exact sum of the
    weights, rounded once.
    """
    try:
        total = math.fsum(weights)
    except OverflowError:  # a power of two changes none of the quotients
        return compute_factors([weight * 2.0**-64 for weight in weights], dtype)
    if total == 0.0:
        return None
    kind = get_accumulator_dtype(dtype).type
    return [kind(weight / total) for weight in weights]


def check_weights(weights: Sequence[float], count: int) -> list[float]:
    """Return `weights` as floats. Raise InputError unless there are `count`, finite and not negative."""
    values = [float(weight) for weight in weights]
    if len(values) != count or not all(0.0 <= value < math.inf for value in values):
        raise InputError(
            f"weights must hold one finite number >= 0 for each of the {count} shards hosted here. "
            f"Received: {values}"
        )
    return values


def split_by_pages(length: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """Return `parts` half-open intervals of elements that cover [0, length) in order.

    Cuts fall on whole pages of memory, so that no two processes write the same cache line. If the buffer is
    smaller than `parts` pages, some intervals are empty.
    """
    unit = max(1, PAGE // itemsize)
    units = -(-length // unit)
    cuts = [min(length, units * part // parts * unit) for part in range(parts + 1)]
    return list(pairwise(cuts))


def split_chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Return [start, stop) cut into half-open intervals of `size` elements; the last one may be shorter."""
    return [(low, min(stop, low + size)) for low in range(start, stop, size)]


class Reducer:
    """Reduces rows of one dtype by one operation, always in the order in which they are given.

    It has scratch memory of its own: not for several threads.
    """

    def __init__(self, op: ReduceOp, dtype: np.dtype, num_shards: int, limit: int) -> None:
        """`limit` is the greatest length of a row in elements."""
        check_reducible(dtype, op)
        self.op = op
        self.dtype = dtype
        #: The dtype in which rows are summed.
        self.sum_dtype = get_accumulator_dtype(dtype)
        self._divisor = num_shards
        self._limit = limit
        self._spare: Array | None = None
        self._total: Array | None = None

    def reduce(self, rows: Sequence[Array], out: Array, factors: Factors | None = None) -> None:
        """Write the reduction of `rows` (one per shard, in shard order) to `out`.

        `out` may be the first of the rows, none of the others. `factors` come from `compute_factors`; a row
        whose factor is 0 is not read. At least one factor is not 0.
        """
        if self.sum_dtype is not self.dtype:
            if self._total is None:
                self._total = np.empty(self._limit, self.sum_dtype)
            total = self._total[: len(out)]
        else:
            total = out
        self.accumulate(total, rows, factors, True)
        self.finish(total, out)

    def bind(self, rows: Sequence[Array], out: Array) -> Callable[[Factors | None], None]:
        """Return `reduce` for these rows and this `out`, which is none of them, to be called many times. For
        small arrays a plain sum then costs only its additions."""
        if self.op != "sum" or self.sum_dtype is not self.dtype or len(rows) < 2:
            return partial(self.reduce, rows, out)
        first, second, *rest = rows

        def reduce(factors: Factors | None) -> None:
            with np.errstate(all="ignore"):
                np.add(first, second, out)
                for row in rest:
                    np.add(out, row, out)
                _unify_nan(out)

        return reduce

    def accumulate(self, total: Array, rows: Sequence[Array], factors: Factors | None, empty: bool) -> bool:
        """Add `rows` to `total`, which holds the sum of all rows before, in the dtype of summation.

        `empty`: it holds nothing yet. Return True if it still holds nothing.
        """
        with np.errstate(all="ignore"):
            if factors is not None:
                return self._add_weighted_rows(total, rows, factors, empty)
            if not rows:
                return empty
            if self.sum_dtype is not self.dtype:
                return self._add_narrow_rows(total, rows, empty)
            return self._add_rows(total, rows, empty)

    def finish(self, total: Array, out: Array) -> None:
        """Turn the sum of all rows into the result."""
        with np.errstate(all="ignore"):
            if self.op == "mean":
                np.true_divide(total, self._divisor, total)
            if self.op != "sum" or self._divisor > 1:
                _unify_nan(total)
            if out is not total:
                np.copyto(out, total, casting="unsafe")

    def _add_rows(self, total: Array, rows: Sequence[Array], empty: bool) -> bool:
        if empty and len(rows) == 1:
            if rows[0] is not total:
                np.copyto(total, rows[0])
            return False
        rest = rows
        if empty:
            np.add(rows[0], rows[1], total)
            rest = rows[2:]
        for row in rest:
            np.add(total, row, total)
        return False

    def _get_scratch(self, length: int) -> Array:
        if self._spare is None:
            self._spare = np.empty(self._limit, self.sum_dtype)
        return self._spare[:length]

    def _add_narrow_rows(self, total: Array, rows: Sequence[Array], empty: bool) -> bool:
        spare = self._get_scratch(len(total))
        if empty:
            np.copyto(total, rows[0], casting="unsafe")
        for row in rows[1:] if empty else rows:
            np.copyto(spare, row, casting="unsafe")
            np.add(total, spare, total)
        return False

    def _add_weighted_rows(self, total: Array, rows: Sequence[Array], factors: Factors, empty: bool) -> bool:
        spare = self._get_scratch(len(total))
        for row, factor in zip(rows, factors, strict=True):
            if factor == 0:
                continue
            np.multiply(row, factor, total if empty else spare, dtype=self.sum_dtype)
            if not empty:
                np.add(total, spare, total)
            empty = False
        return empty


def _unify_nan(array: Array) -> None:
    """Give each NaN the same bits. Those of an addition depend on the order of the operands, which compilers
    and NumPy choose."""
    if array.dtype.kind == "f" and array.size and np.isnan(array.max()):
        np.copyto(array, np.nan, where=np.isnan(array))
