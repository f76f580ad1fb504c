"""The transport over several hosts."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from exchange_ranks import in_threads

from insitu import exchange
from insitu.errors import ExchangeError


def test_mismatch_within_a_host_raises_on_all_hosts() -> None:
    def run(rank: int, addresses: list[str]) -> None:
        with exchange.join(rank, addresses, stall_timeout=20) as group:
            assert group.transport == "shm+tcp"
            with pytest.raises(ExchangeError):
                group.all_reduce(np.ones(3, np.float32), "mean" if rank % 2 else "sum")

    hosts = iter([f"host {number}" for number in (0, 1, 0, 1)])
    with mock.patch("insitu.exchange.memory.read_host_identity", lambda: next(hosts)):
        in_threads(4, run)
