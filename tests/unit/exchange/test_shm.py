"""The transport in shared memory: copies, and rows for the transport over several hosts."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_ranks import in_threads

from insitu import exchange
from insitu.exchange.plan.transport import Reduction
from insitu.exchange.shm import SharedMemoryTransport
from insitu.exchange.shm_layout import SLOT_BYTES


@pytest.mark.parametrize("size", [0, 1, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES])
def test_gather_and_broadcast_of_any_size(size: int) -> None:
    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, transport="shm") as group:
            array = np.full(size, rank + 1, np.uint8)
            assert (group.all_gather(array) == [[1], [2], [3]]).all()
            assert (group.broadcast(array, 1) == 2).all()

    in_threads(3, run)


@pytest.mark.parametrize("in_buffer", [True, False])
def test_rows_of_all_members_are_mapped(in_buffer: bool) -> None:
    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, transport="shm") as group:
            transport = group._transport
            assert isinstance(transport, SharedMemoryTransport)
            array = group.buffer(100, np.float32) if in_buffer else np.empty(100, np.float32)
            array[:] = rank
            reduction = Reduction("sum", array.dtype, 100, (array,), array)
            _, rows, whole = transport.map_rows(reduction)
            transport.synchronize("mapped rows")
            assert [row[0] for row in rows] == [0, 1]
            if rank == 0:
                whole[:] = 7
            transport.synchronize("written")
            assert (whole == 7).all(), "all members share the memory for the result"
            transport.synchronize("read")

    in_threads(2, run)
