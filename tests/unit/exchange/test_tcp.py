"""The transport over TCP."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_ranks import in_threads

from insitu import exchange
from insitu.exchange.tcp import TcpTransport


def test_all_members_have_the_same_costs() -> None:
    def run(rank: int, addresses: list[str]) -> object:
        with exchange.join(rank, addresses, transport="tcp") as group:
            assert isinstance(group._transport, TcpTransport)
            return group._transport.costs

    first, *others = in_threads(3, run)
    assert all(costs == first for costs in others)
    assert all(cost.latency > 0 and cost.seconds_per_byte >= 0 for cost in first.values())


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("size", [0, 1, 100, 700_000])
def test_broadcast_reaches_all_members(size: int, root: int) -> None:
    def run(rank: int, addresses: list[str]) -> bool:
        with exchange.join(rank, addresses, transport="tcp") as group:
            array = np.full(size, rank, np.int32)
            group.broadcast(array, root)
            return bool((array == root).all())

    assert all(in_threads(3, run))


def test_large_buffers_keep_their_address() -> None:
    """The result is swapped into the buffer, page by page."""

    def run(rank: int, addresses: list[str]) -> bool:
        with exchange.join(rank, addresses, transport="tcp") as group:
            buffer = group.buffer(300_001, np.float32)
            address = buffer.ctypes.data
            for turn in range(3):
                buffer[:] = rank + turn
                group.all_reduce(buffer)
                assert (buffer == 3 + 3 * turn).all()
            return buffer.ctypes.data == address

    assert all(in_threads(3, run))
