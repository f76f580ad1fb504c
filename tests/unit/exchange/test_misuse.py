"""What users do that they shouldn't, or that only looks so, and what comes of it on all ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from exchange_ranks import in_threads

from insitu import exchange
from insitu.errors import ExchangeError, InputError
from insitu.exchange import native
from insitu.exchange.transport import Mismatch

TRANSPORTS = ["shm", "tcp"]


def _together(transport: str, action: Callable[[exchange.Group, int], Any]) -> list[Any]:
    def run(rank: int, addresses: list[str]) -> Any:
        with exchange.join(rank, addresses, transport=transport, stall_timeout=20) as group:  # type: ignore[arg-type]
            return action(group, rank)

    return in_threads(2, run)


@pytest.mark.parametrize("transport", [*TRANSPORTS, "solo"])
@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_an_array_that_is_gone_is_not_kept(transport: str, size: int) -> None:
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
        assert _together(transport, run) == [0, 0]
    assert given and all(reference() is None for reference in given)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_array_in_the_place_of_one_that_is_gone_is_another_one(transport: str) -> None:
    def run(group: exchange.Group, rank: int) -> None:
        for size in (5, 50, 5, 5000, 50, 5):
            assert (group.all_reduce(np.full(size, rank + 1.0)) == 3).all()

    _together(transport, run)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", ["all_gather", "broadcast", "all_reduce"])
@pytest.mark.parametrize("size", [3, 100_000])
def test_other_dtypes_of_equal_size_are_a_mismatch(transport: str, operation: str, size: int) -> None:
    def run(group: exchange.Group, rank: int) -> None:
        with pytest.raises(Mismatch, match=r"int32.*float32|float32.*int32"):
            getattr(group, operation)(np.ones(size, (np.float32, np.int32)[rank]))

    _together(transport, run)


def test_ranks_of_one_host_that_reduce_otherwise_are_a_mismatch_between_hosts_too() -> None:
    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, stall_timeout=20) as group:
            assert group.transport == "shm+tcp"
            with pytest.raises(ExchangeError):
                group.all_reduce(np.ones(3, np.float32), "mean" if rank % 2 else "sum")

    hosts = iter([f"host {number}" for number in (0, 1, 0, 1)])
    with mock.patch("insitu.exchange.memory.read_host_identity", lambda: next(hosts)):
        in_threads(4, run)


def test_numbers_of_another_byte_order_are_refused() -> None:
    group = exchange.join(0, ["127.0.0.1:1"])
    foreign = np.ones(3, np.dtype(np.float32).newbyteorder())
    for operation in (group.all_reduce, group.all_gather, group.broadcast, group.reduce_scatter):
        with pytest.raises(InputError, match="byte order"):
            operation(foreign)
        with pytest.raises(InputError):
            operation(np.array([None]))


def test_a_broadcast_is_not_received_in_an_array_that_is_read_only() -> None:
    def run(group: exchange.Group, rank: int) -> None:
        array = np.ones(3)
        array.flags.writeable = False
        if rank == 1:
            with pytest.raises(InputError, match="read-only"):
                group.broadcast(array)
        group.broadcast(array if rank == 0 else np.zeros(3))

    _together("shm", run)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_operation_that_was_interrupted_leaves_no_group_to_go_on_with(transport: str) -> None:
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
def test_what_overflows_does_so_quietly(dtype: str, compiled: bool) -> None:
    most = float(np.finfo(dtype).max)

    def run(group: exchange.Group, rank: int) -> None:
        array = np.array([most, (np.inf, -np.inf)[rank], np.nan] * 5000, dtype)
        with np.errstate(all="raise"):
            result = group.all_reduce(array)
        assert np.isinf(result[0]) and np.isnan(result[1:3]).all()

    with (
        warnings.catch_warnings(),
        mock.patch("insitu.exchange.native.load_kernels", native.load_kernels if compiled else lambda: None),
    ):
        warnings.simplefilter("error")
        for transport in TRANSPORTS:
            _together(transport, run)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_may_be_as_great_as_floats_can_be(transport: str) -> None:
    def run(group: exchange.Group, rank: int) -> float:
        return float(group.all_reduce(np.full(3, rank + 1.0), "weighted_mean", [1.5e308])[0])

    assert _together(transport, run) == [1.5, 1.5]


def test_ranks_shards_and_lengths_may_come_from_numpy() -> None:
    def run(rank: int, addresses: list[str]) -> tuple[int, ...]:
        mine = np.array([2 * rank, 2 * rank + 1])
        with exchange.join(np.int64(rank), addresses, shards=mine, num_shards=4) as group:  # type: ignore[arg-type]
            return group.buffer(np.prod([2, 3]), np.float32).shape

    assert in_threads(2, run) == [(6,), (6,)]


@pytest.mark.parametrize(
    "wrong", [{"secret": "text"}, {"timeout": float("nan")}, {"timeout": 0.0}, {"stall_timeout": -1.0}]
)
def test_what_cannot_be_meant_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        exchange.join(0, ["127.0.0.1:1", "127.0.0.1:2"], **wrong)
