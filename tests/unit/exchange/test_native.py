"""The compiled sums have the bits of NumPy's."""

from __future__ import annotations

import numpy as np
from exchange_sessions import shm_sessions
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.exchange import native
from insitu.exchange.plan.arithmetic import PAGE, ReduceOp, Reducer, compute_factors


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6),
    st.integers(1, 3000),
    st.sampled_from(["float32", "float64", "int32", "int64"]),
    st.sampled_from(["sum", "mean", "weighted_mean"]),
    st.booleans(),
)
def test_compiled_sum_has_the_bits_of_numpy(
    shards: int, length: int, name: str, op: ReduceOp, odd: bool
) -> None:
    kernels, dtype = native.load_kernels(), np.dtype(name)
    op = "sum" if dtype.kind == "i" else op
    rows = (np.random.default_rng(length).standard_normal((shards, length)) * 1e6).astype(dtype)
    if odd and dtype.kind == "f":
        chance = np.random.default_rng(length + 1)
        rows = chance.choice([1, np.inf, -np.inf, np.nan, -np.nan], (shards, length)).astype(dtype)
    given_factors = compute_factors([float(s % 3) + (shards == 1) for s in range(shards)], dtype)
    factors = np.array(given_factors, np.float64) if op == "weighted_mean" else None
    want, got, scratch = np.empty(length, dtype), np.empty(length, dtype), np.empty(PAGE, np.uint8)
    used = given_factors if op == "weighted_mean" else None
    Reducer(op, dtype, shards, length).reduce(list(rows), want, used)
    with shm_sessions([list(range(shards))]) as (session,):
        words = np.zeros(2, np.uint64)
        prepared = native.prepare_region_reduction(
            session.barrier.struct_address,
            native.describe_sum(op, dtype, shards, factors),
            (1, 2),
            (0, length),
            PAGE // dtype.itemsize,
            list(rows),
            [got],
            scratch,
            (native.address_of(words), native.address_of(words) + 8),
        )
        assert kernels.barrier_and_reduce_region(prepared.address, 1) == native.ARRIVED
    assert got.tobytes() == want.tobytes()


def test_evicted_member_stops() -> None:
    kernels, rows = native.load_kernels(), [np.ones(10, np.float32)]
    result, words = np.zeros(10, np.float32), np.array([0, 1], np.uint64)
    with shm_sessions([[0]]) as (session,):
        prepared = native.prepare_region_reduction(
            session.barrier.struct_address,
            native.describe_sum("sum", result.dtype, 1, None),
            (1, 2),
            (0, 10),
            10,
            rows,
            [result],
            np.empty(PAGE, np.uint8),
            (native.address_of(words), native.address_of(words) + 8),
        )
        assert kernels.reduce_region(prepared.address, 1) == native.EVICTED
    assert not result.any()


@given(st.integers(0, 1 << 45))
def test_progress_of_a_row_fits_into_its_bits(row_bytes: int) -> None:
    pieces = -(-row_bytes // native.choose_piece_bytes(row_bytes))
    assert 2 * pieces < 1 << native.PIECE_BITS


def test_supported_dtypes() -> None:
    assert native.supports(np.dtype(np.float32))
    assert not native.supports(np.dtype(np.float16))
    assert not native.supports(np.dtype(np.float32).newbyteorder())
