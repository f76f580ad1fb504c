"""The operations of a group: their results, bit for bit, and the rejection of invalid calls."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from exchange_ranks import SECRET, in_threads
from exchange_transports import FORCED_TRANSPORTS, forced_transport
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy_reference import sums_in_python

from insitu import exchange
from insitu.base.errors import ExchangeError, InputError
from insitu.exchange.group import Group
from insitu.exchange.plan.transport import Mismatch

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64]
TRANSPORTS = ["shm", "tcp"]
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([1023, 4097, 16384, 16385, 40001, 70001]))


def rows_of(length: int, shards: int, dtype: np.dtype, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype.kind == "i":
        return random.integers(-1000, 1000, (shards, length)).astype(dtype)
    return (
        random.standard_normal((shards, length)) * 10.0 ** random.integers(-3, 3, (shards, length))
    ).astype(dtype)


def expected(rows: np.ndarray, op: str, weights: list[float] | None) -> np.ndarray:
    """One addition after the other, in shard order."""
    dtype = rows.dtype
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
    total = None
    for shard, row in enumerate(rows):
        value = row.astype(wide)
        if weights is not None:
            if weights[shard] == 0:
                continue
            value = value * wide.type(weights[shard] / sum(weights))
        total = value if total is None else total + value
    assert total is not None
    if op == "mean":
        total = total / wide.type(len(rows))
    return total.astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@st.composite
def layouts(draw: st.DrawFn) -> list[list[int]]:
    """Which shards each of 1 to 8 ranks hosts: any split, also none at all for a rank."""
    size = draw(st.integers(1, 8))
    count = draw(st.integers(1, 8))
    owner = draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))
    return [[s for s in range(count) if owner[s] == rank] for rank in range(size)]


def content(own: np.ndarray) -> np.ndarray:
    """What a rank with these rows passes: (rows, n), or (n,) where it has one row or none."""
    return own if len(own) > 1 else own[0] if len(own) else np.zeros(own.shape[1:], own.dtype)


def make_array(group: Group, own: np.ndarray, kind: str) -> np.ndarray:
    """This rank's rows, in the form that all_reduce wants."""
    values = content(own)
    if kind == "buffer":
        array = group.buffer(values.shape, values.dtype)
        array[...] = values
        return array
    return np.array(values)


@pytest.mark.parametrize("transport", FORCED_TRANSPORTS)
@settings(max_examples=16, deadline=None)
@given(
    layout=layouts(),
    length=LENGTHS,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "mean", "weighted_mean"]),
    kind=st.sampled_from(["buffer", "array"]),
    seed=st.integers(0, 99),
)
@example([[0, 1, 3], [2]], 0, np.float32, "weighted_mean", "array", 1)
@example([[0, 1], [2], [3, 4], []], 40001, ml_dtypes.bfloat16, "sum", "array", 1)
@example([[2], [0, 3], [1]], 4097, np.float16, "mean", "buffer", 2)
@example([[1, 3], [0], [2]], 70001, np.float64, "weighted_mean", "buffer", 3)
def test_all_reduce_sums_in_shard_order(
    transport: str, layout: list[list[int]], length: int, dtype: type, op: str, kind: str, seed: int
) -> None:
    count = sum(map(len, layout))
    rows = rows_of(length, count, np.dtype(dtype), seed)
    op = "sum" if rows.dtype.kind == "i" else op
    weights = None
    if op == "weighted_mean":
        weights = [float(w) for w in np.random.default_rng(seed).integers(0, 3, count)]
        weights[seed % count] += 1.0
        rows[np.array(weights) == 0] = np.nan
    want = expected(rows, op, weights)

    def run(rank: int, addresses: list[str]) -> list[np.ndarray]:
        own = layout[rank]
        threading.current_thread().name = f"rank {rank}"
        name = {"numpy": "shm", "shm": "shm"}.get(transport, "auto" if "hosts" in transport else "tcp")
        with exchange.join(
            rank,
            addresses,
            shards=own,
            num_shards=count,
            secret=SECRET,
            transport=name,  # type: ignore[arg-type]
        ) as group:
            array = make_array(group, rows[own], kind)
            results = []
            local = None if weights is None else [weights[s] for s in own]
            for _ in range(2):
                array[...] = content(rows[own])
                results.append(group.all_reduce(array, op, local).copy())  # type: ignore[arg-type]
            array[...] = content(rows[own])
            part = group.reduce_scatter(array, op, local)  # type: ignore[arg-type]
            start, stop = group.part(length, array.dtype)
            assert same_bits(part, want[start:stop])
            assert same_bits(group.all_gather(array), rows)
            for root in {0, group.size - 1}:
                sent = np.full(length + 1, rank, np.int64)
                assert (group.broadcast(sent, root) == root).all()
            group.barrier()
            return results

    with forced_transport(transport):
        for results in in_threads(len(layout), run):
            assert all(same_bits(result, want) for result in results)


@pytest.mark.parametrize("transport", FORCED_TRANSPORTS)
@pytest.mark.parametrize("op", ["sum", "mean", "weighted_mean"])
def test_what_is_no_number_has_the_same_bits(transport: str, op: str) -> None:
    layout, cases = (
        [[0], [1], [2, 3]],
        list(itertools.product(["float16", "float32", "float64"], [7, 20_000])),
    )
    weights = [1.0, 2.0, 0.0, 3.0] if op == "weighted_mean" else None
    odd = np.random.default_rng(0).choice([1, np.inf, -np.inf, np.nan, -np.nan], (4, 20_000))

    def run(rank: int, addresses: list[str]) -> list[np.ndarray]:
        threading.current_thread().name = f"rank {rank}"
        name = {"numpy": "shm", "shm": "shm"}.get(transport, "auto" if "hosts" in transport else "tcp")
        own = layout[rank]
        local = None if weights is None else [weights[s] for s in own]
        with exchange.join(
            rank,
            addresses,
            shards=own,
            num_shards=4,
            secret=SECRET,
            transport=name,  # type: ignore[arg-type]
        ) as group:
            arrays = [np.array(content(odd[own, :length].astype(dtype))) for dtype, length in cases]
            return [group.all_reduce(array, op, local).copy() for array in arrays]  # type: ignore[arg-type]

    with forced_transport(transport):
        found = in_threads(3, run)
    for number, (dtype, length) in enumerate(cases):
        with np.errstate(all="ignore"):
            want = expected(odd[:, :length].astype(dtype), op, weights)
        want[np.isnan(want)] = np.nan
        assert np.isnan(want).any()
        assert all(same_bits(results[number], want) for results in found), (dtype, length)


def test_all_reduce_with_zero_weights_changes_no_array() -> None:
    def run(rank: int, addresses: list[str]) -> bool:
        with exchange.join(rank, addresses) as group:
            for size in (10, 100_000):
                array = np.full(size, float(rank), np.float32)
                buffer = group.buffer(size, np.float32)
                buffer[:] = rank
                assert group.all_reduce(array, "weighted_mean", [0.0]) is array
                assert group.all_reduce(buffer, "weighted_mean", [0.0]) is buffer
                assert (array == rank).all() and (buffer == rank).all()
            return True

    assert all(in_threads(2, run))


def test_all_reduce_rejects_invalid_input() -> None:
    group = exchange.join(0, ["127.0.0.1:1"])
    for array, op, weights in [
        (np.zeros(3, np.uint8), "sum", None),
        (np.zeros(3, np.int32), "mean", None),
        (np.zeros(3, np.float32), "median", None),
        (np.zeros((4, 4), np.float32).T[1:], "sum", None),
        (np.zeros(3, np.float32), "weighted_mean", None),
        (np.zeros(3, np.float32), "weighted_mean", [1.0, 2.0]),
        (np.zeros(3, np.float32), "weighted_mean", [-1.0]),
        (np.zeros(3, np.float32), "weighted_mean", [float("nan")]),
        (np.zeros(3, np.float32), "sum", [1.0]),
    ]:
        with pytest.raises(InputError):
            group.all_reduce(array, op, weights)  # type: ignore[arg-type]
    assert group.last_completed == -1


def _run_both(transport: str, action: Callable[[exchange.Group, int], Any]) -> list[Any]:
    def run(rank: int, addresses: list[str]) -> Any:
        with exchange.join(rank, addresses, transport=transport, stall_timeout=20) as group:  # type: ignore[arg-type]
            return action(group, rank)

    return in_threads(2, run)


@pytest.mark.parametrize("transport", [*TRANSPORTS, "solo"])
@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_prepared_operation_does_not_keep_the_array(transport: str, size: int) -> None:
    given: list[weakref.ref[np.ndarray]] = []

    def run(group: exchange.Group, rank: int) -> int:
        for _ in range(5):
            array = np.ones(size, np.float32)
            given.append(weakref.ref(array))
            group.all_reduce(array)
            del array
        return len(group._prepared)

    if transport == "solo":
        with exchange.join(0, ["127.0.0.1:1"]) as group:
            assert run(group, 0) == 0
    else:
        assert _run_both(transport, run) == [0, 0]
    assert given and all(reference() is None for reference in given)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_array_at_the_address_of_a_deleted_one_is_prepared_again(transport: str) -> None:
    def run(group: exchange.Group, rank: int) -> None:
        for size in (5, 50, 5, 5000, 50, 5):
            assert (group.all_reduce(np.full(size, rank + 1.0)) == 3).all()

    _run_both(transport, run)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", ["all_gather", "broadcast", "all_reduce"])
@pytest.mark.parametrize("size", [3, 100_000])
def test_different_dtypes_of_equal_size_raise_mismatch(transport: str, operation: str, size: int) -> None:
    def run(group: exchange.Group, rank: int) -> None:
        with pytest.raises(Mismatch, match=r"int32.*float32|float32.*int32"):
            getattr(group, operation)(np.ones(size, (np.float32, np.int32)[rank]))

    _run_both(transport, run)


@pytest.mark.parametrize("kind", ["matrix", "masked"])
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_that_are_more_than_their_values_are_rejected(kind: str) -> None:
    plain = np.array([[1.0, 2.0]])
    array = np.asmatrix(plain) if kind == "matrix" else np.ma.masked_array(plain, [[True, False]])
    with exchange.join(0, ["127.0.0.1:1"]) as group:
        for operation in (group.broadcast, group.all_reduce, group.all_gather, group.reduce_scatter):
            with pytest.raises(InputError, match=r"plain numpy.ndarray.*Received: (matrix|MaskedArray)"):
                operation(array)


def test_two_threads_in_a_group_are_an_error_of_the_second() -> None:
    with exchange.join(0, ["127.0.0.1:1"]) as group:
        inside, told = threading.Event(), threading.Event()

        def gather(*_: Any) -> None:
            inside.set()
            assert told.wait(60)

        with ThreadPoolExecutor(1) as pool, mock.patch.object(group._transport, "gather", gather):
            first = pool.submit(group.barrier)
            assert inside.wait(60)
            with pytest.raises(InputError, match="one thread at a time"):
                group.all_reduce(np.ones(3))
            told.set()
            first.result()
        assert group.all_reduce(np.ones(3)).tolist() == [1, 1, 1]
        assert not group.stats["all_reduce"].last, "alone, none comes last"


def test_a_timeout_is_a_number() -> None:
    with pytest.raises(InputError, match="timeout must be a number of seconds"):
        exchange.join(0, ["127.0.0.1:1"], timeout=None)  # type: ignore[arg-type]


def test_foreign_byte_order_is_rejected() -> None:
    group = exchange.join(0, ["127.0.0.1:1"])
    foreign = np.ones(3, np.dtype(np.float32).newbyteorder())
    for operation in (group.all_reduce, group.all_gather, group.broadcast, group.reduce_scatter):
        with pytest.raises(InputError, match="byte order"):
            operation(foreign)
        with pytest.raises(InputError):
            operation(np.array([None]))


def test_broadcast_rejects_read_only_receivers() -> None:
    def run(group: exchange.Group, rank: int) -> None:
        array = np.ones(3)
        array.flags.writeable = False
        if rank == 1:
            with pytest.raises(InputError, match="read-only"):
                group.broadcast(array)
        group.broadcast(array if rank == 0 else np.zeros(3))

    _run_both("shm", run)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interrupted_operation_breaks_the_group(transport: str) -> None:
    def run(group: exchange.Group, rank: int) -> None:
        if rank == 0:
            group.all_reduce(np.ones(3))
            return
        interrupt = mock.Mock(side_effect=KeyboardInterrupt)
        with (
            mock.patch.object(group._transport, "gather", interrupt, create=True)
            if transport == "tcp"
            else mock.patch.object(type(group._transport), "gather", interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            group.barrier()
        with pytest.raises(ExchangeError, match="interrupted by KeyboardInterrupt"):
            group.all_reduce(np.ones(3))

    def alone(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, transport=transport) as group:  # type: ignore[arg-type]
            if rank == 1:
                run(group, rank)

    in_threads(2, alone)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_overflow_gives_no_warning(dtype: str, compiled: bool) -> None:
    most = float(np.finfo(dtype).max)

    def run(group: exchange.Group, rank: int) -> None:
        array = np.array([most, (np.inf, -np.inf)[rank], np.nan] * 5000, dtype)
        with np.errstate(all="raise"):
            result = group.all_reduce(array)
        assert np.isinf(result[0]) and np.isnan(result[1:3]).all()

    with (
        warnings.catch_warnings(),
        sums_in_python(lambda: not compiled),
    ):
        warnings.simplefilter("error")
        for transport in TRANSPORTS:
            _run_both(transport, run)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_up_to_the_largest_float_are_accepted(transport: str) -> None:
    def run(group: exchange.Group, rank: int) -> float:
        return float(group.all_reduce(np.full(3, rank + 1.0), "weighted_mean", [1.5e308])[0])

    assert _run_both(transport, run) == [1.5, 1.5]
