"""The result is the sum in shard order, bit for bit, however the shards are spread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from exchange_ranks import SECRET, in_threads
from hypothesis import example, given, settings
from hypothesis import strategies as st

from insitu import exchange
from insitu.errors import InputError
from insitu.exchange import native
from insitu.exchange.costs import find_chain_order
from insitu.exchange.group import Group
from insitu.exchange.transport import Members

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64]
WAYS = ["gather", "star", "direct", "chain"]
WITHOUT_COMPILER = [f"{way} without compiler" for way in WAYS[:3]]
TRANSPORTS = ["shm", "numpy", "tcp", *WAYS, *WITHOUT_COMPILER, "two hosts", "three hosts"]
"""Or shared memory where rank 1 has no compiler, an algorithm of TCP that is forced, the same where rank 1
has no compiler, or hosts that the ranks are dealt out to."""
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=40, deadline=None)
@given(
    layout=layouts(),
    length=LENGTHS,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "mean", "weighted_mean"]),
    kind=st.sampled_from(["buffer", "array"]),
    seed=st.integers(0, 99),
)
@example([[0, 1, 3], [2]], 0, np.float32, "weighted_mean", "array", 1)
def test_all_reduce_is_the_sum_in_shard_order(
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

    with arranged(transport):
        for results in in_threads(len(layout), run):
            assert all(same_bits(result, want) for result in results)


@contextlib.contextmanager
def arranged(transport: str) -> Iterator[None]:
    """Forces an algorithm, or deals ranks out to hosts that they believe to be different."""
    with contextlib.ExitStack() as stack:
        if "hosts" in transport:
            hosts = 2 if transport == "two hosts" else 3
            name = lambda: f"host {int(threading.current_thread().name.split()[1]) % hosts}"  # noqa: E731
            stack.enter_context(mock.patch("insitu.exchange.memory.read_host_identity", name))
        if transport == "numpy" or "without compiler" in transport:
            compiled = native.load_kernels()
            some = lambda: None if threading.current_thread().name == "rank 1" else compiled  # noqa: E731
            stack.enter_context(mock.patch("insitu.exchange.native.load_kernels", some))
        way = transport.split()[0]
        if way in WAYS:

            def choose(members: Members, *_: object) -> str:
                return way if way != "chain" or find_chain_order(members) is not None else "direct"

            stack.enter_context(mock.patch("insitu.exchange.tcp.choose_algorithm", choose))
        yield


def test_shared_memory_is_the_choice_on_one_host_and_tcp_between_hosts() -> None:
    def run(rank: int, addresses: list[str]) -> str:
        threading.current_thread().name = f"rank {rank}"
        with exchange.join(rank, addresses) as group:
            return group.transport

    assert in_threads(3, run) == ["shm"] * 3
    with arranged("three hosts"):
        assert in_threads(3, run) == ["tcp"] * 3
        assert in_threads(5, run) == ["shm+tcp"] * 5


def test_weights_that_are_all_zero_touch_nothing() -> None:
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


def test_what_cannot_be_reduced_is_refused() -> None:
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
