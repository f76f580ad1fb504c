"""The order of summation, and how a buffer is cut into parts."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.exchange.plan.arithmetic import (
    PAGE,
    ReduceOp,
    Reducer,
    check_reducible,
    check_weights,
    compute_factors,
    get_accumulator_dtype,
    split_by_pages,
    split_chunks,
)


@given(st.integers(0, 10**7), st.integers(1, 20), st.sampled_from([2, 4, 8]))
def test_parts_cover_the_length_and_are_cut_at_pages(length: int, parts: int, itemsize: int) -> None:
    intervals = split_by_pages(length, parts, itemsize)
    assert len(intervals) == parts
    assert intervals[0][0] == 0 and intervals[-1][1] == length
    for (_, end), (start, _) in pairwise(intervals):
        assert end == start
        assert end * itemsize % PAGE == 0 or end == length


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_chunks_cover_the_interval(start: int, length: int, size: int) -> None:
    chunks = split_chunks(start, start + length, size)
    assert [i for low, high in chunks for i in range(low, high)] == list(range(start, start + length))
    assert all(high - low == size for low, high in chunks[:-1])


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=8))
def test_factors_sum_to_one(weights: list[float]) -> None:
    factors = compute_factors(weights, np.dtype(np.float64))
    if not any(weights):
        assert factors is None
    else:
        assert factors is not None
        assert sum(map(float, factors)) == pytest.approx(1.0)


def test_factors_do_not_overflow() -> None:
    assert compute_factors([1.5e308, 1.5e308], np.dtype(np.float32)) == [np.float32(0.5)] * 2


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_rounded_once(dtype: type) -> None:
    rows = [np.full(3, value, dtype) for value in (1.0, 2.0**-9, 2.0**-9)]
    assert get_accumulator_dtype(rows[0].dtype) == np.float32
    out = np.empty(3, dtype)
    Reducer("sum", out.dtype, 3, 3).reduce(rows, out)
    assert out.astype(np.float32).tolist() == [float(dtype(1.0 + 2.0**-8))] * 3


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    st.sampled_from(["sum", "mean", "weighted_mean"]),
)
def test_each_way_to_reduce_gives_the_same_bits(shards: int, seed: int, dtype: type, op: ReduceOp) -> None:
    """At once, bound to its rows, or row by row as they arrive."""
    rng = np.random.default_rng(seed)
    rows = list(rng.standard_normal((shards, 50)).astype(dtype))
    reducer = Reducer(op, np.dtype(dtype), shards, 50)
    factors = compute_factors(rng.uniform(1, 9, shards), np.dtype(dtype)) if op == "weighted_mean" else None
    whole, bound, last = np.empty(50, dtype), np.empty(50, dtype), np.empty(50, dtype)
    reducer.reduce(rows, whole, factors)
    reducer.bind(rows, bound)(factors)
    total, empty = np.empty(50, reducer.sum_dtype), True
    for number, row in enumerate(rows):
        empty = reducer.accumulate(total, [row], factors and factors[number : number + 1], empty)
    reducer.finish(total, last)
    assert whole.tobytes() == bound.tobytes() == last.tobytes()


def test_rows_of_factor_0_are_not_read() -> None:
    rows = [np.full(4, np.nan), np.ones(4), np.full(4, 3.0)]
    factors = compute_factors([0.0, 1.0, 1.0], np.dtype(np.float64))
    out = np.empty(4)
    Reducer("weighted_mean", out.dtype, 3, 4).reduce(rows, out, factors)
    assert out.tolist() == [2.0] * 4


@pytest.mark.parametrize(("dtype", "op"), [("uint8", "sum"), ("int32", "mean"), ("float32", "median")])
def test_other_dtypes_and_operations_are_rejected(dtype: str, op: str) -> None:
    with pytest.raises(InputError, match="Received"):
        check_reducible(np.dtype(dtype), op)


@pytest.mark.parametrize("weights", [[], [1.0, 2.0], [-1.0], [float("nan")], [float("inf")]])
def test_invalid_weights_are_rejected(weights: list[float]) -> None:
    with pytest.raises(InputError, match="one finite number"):
        check_weights(weights, 1)
