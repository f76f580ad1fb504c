"""The transport over several hosts."""

from __future__ import annotations

import threading
from unittest import mock

import numpy as np
import pytest
from exchange_ranks import in_threads
from exchange_transports import forced_transport

from insitu import exchange
from insitu.base.errors import ExchangeError


def test_mismatch_within_a_host_raises_on_all_hosts() -> None:
    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, stall_timeout=20) as group:
            assert group.transport == "shm+tcp"
            with pytest.raises(ExchangeError):
                group.all_reduce(np.ones(3, np.float32), "mean" if rank % 2 else "sum")

    hosts = iter([f"host {number}" for number in (0, 1, 0, 1)])
    with mock.patch("insitu.exchange.memory.read_host_identity", lambda: next(hosts)):
        in_threads(4, run)


@pytest.mark.parametrize("size", [5, 20_000, 300_000])
@pytest.mark.parametrize("root", [0, 3])
def test_operations_between_two_hosts_of_two_ranks(size: int, root: int) -> None:
    def run(rank: int, addresses: list[str]) -> None:
        threading.current_thread().name = f"rank {rank}"
        with exchange.join(rank, addresses, stall_timeout=20) as group:
            assert group.transport == "shm+tcp"
            array = np.full(size, rank + 1.0, np.float32)
            weights = [0.0 if rank == 0 else 2.0]
            assert (group.all_reduce(array.copy(), "weighted_mean", weights) == 3).all()
            start, stop = group.part(size, array.dtype)
            assert (group.reduce_scatter(array) == np.full(stop - start, 10)).all()
            assert (group.all_gather(array)[:, 0] == [1, 2, 3, 4]).all()
            array.setflags(write=rank != root)  # what the root sends may be read-only
            assert (group.broadcast(array, root) == root + 1).all()

    with forced_transport("two hosts"):
        in_threads(4, run)
