"""Which way of reducing over TCP is taken when."""

from __future__ import annotations

import pytest

from insitu.exchange.costs import Costs, choose
from insitu.exchange.transport import Members

LOOPBACK = Costs(latency=20e-6, bandwidth=6e9, summing=20e9)
NETWORK = Costs(latency=100e-6, bandwidth=1.2e9, summing=20e9)
CHUNK = 256 * 1024


@pytest.mark.parametrize("costs", [LOOPBACK, NETWORK])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_small_buffers_go_to_everybody_and_large_ones_are_shared_out(size: int, costs: Costs) -> None:
    members = Members(0, tuple((rank,) for rank in range(size)), size)
    assert choose(members, 1024, CHUNK, costs) == "gather"
    assert choose(members, 100_000_000, CHUNK, costs) == "direct"


def test_hosts_of_many_shards_pass_on_a_running_sum() -> None:
    members = Members(0, (tuple(range(8)), tuple(range(8, 16))), 16)
    assert choose(members, 100_000_000, CHUNK, NETWORK) == "chain"
    scattered = Members(0, (tuple(range(0, 16, 2)), tuple(range(1, 16, 2))), 16)
    assert choose(scattered, 100_000_000, CHUNK, NETWORK) == "direct"
