"""The choice of an algorithm to reduce over TCP."""

from __future__ import annotations

import pytest

from insitu.exchange.plan.costs import Costs, LinearCost, choose_algorithm
from insitu.exchange.plan.transport import Members

CHUNK = 256 * 1024


def make_costs(latency: float, bandwidth: float, size: int, shards: int = 1) -> Costs:
    """Of `size` hosts with a processor and `shards` shards each: latency in seconds per message, bandwidth in
    bytes per second out of one of them."""
    others = size - 1
    return {
        "gather": LinearCost(latency, others * shards / bandwidth),
        "star": LinearCost(2 * latency, others * (shards + 1) / bandwidth),
        "direct": LinearCost(
            2 * latency, 2 * others / size * (shards + 1) / bandwidth
        ),  # too short to overlap
    }


def one_shard_each(size: int) -> Members:
    return Members(0, tuple((rank,) for rank in range(size)), size)


@pytest.mark.parametrize(("latency", "bandwidth"), [(20e-6, 6e9), (100e-6, 1.2e9)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gather_for_small_rows_and_direct_for_large_ones(size: int, latency: float, bandwidth: float) -> None:
    costs = make_costs(latency, bandwidth, size)
    assert choose_algorithm(one_shard_each(size), 1024, CHUNK, costs) == "gather"
    assert choose_algorithm(one_shard_each(size), 100_000_000, CHUNK, costs) == "direct"


def test_star_where_members_share_processors() -> None:
    """Figures of 8 ranks on 2 processors."""
    costs: Costs = {
        "gather": LinearCost(280e-6, 11e-9),
        "star": LinearCost(94e-6, 2.7e-9),
        "direct": LinearCost(320e-6, 2.3e-9),
    }
    assert choose_algorithm(one_shard_each(8), 1024, CHUNK, costs) == "star"
    assert choose_algorithm(one_shard_each(8), 262_144, CHUNK, costs) == "star"
    assert choose_algorithm(one_shard_each(8), 4_000_000, CHUNK, costs) == "direct"


@pytest.mark.parametrize("favourite", ["gather", "star"])
def test_direct_where_all_rows_would_need_too_much_memory(favourite: str) -> None:
    costs = {
        algorithm: LinearCost(0.0 if algorithm == favourite else 0.1, 1e-9)
        for algorithm in ("gather", "star", "direct")
    }
    scattered = Members(0, ((0, 4), (1, 5), (2, 6), (3, 7)), 8)  # so that there is no chain
    assert choose_algorithm(scattered, 1_000_000, CHUNK, costs) == favourite  # type: ignore[arg-type]
    assert choose_algorithm(scattered, 100_000_000, CHUNK, costs) == "direct"  # type: ignore[arg-type]


def test_small_rows_are_cut_into_parts_only_where_all_would_need_too_much_memory() -> None:
    costs: Costs = {
        "gather": LinearCost(1.0, 0.0),
        "star": LinearCost(0.9, 0.0),
        "direct": LinearCost(0.0, 0.0),
    }
    few, many = (Members(0, tuple((0 + r, n - 1 - r) for r in range(n // 2)), n) for n in (4, 200))
    assert choose_algorithm(few, 60_000, CHUNK, costs) == "gather"
    assert choose_algorithm(many, 60_000, CHUNK, costs) == "direct"


def test_gather_for_rows_without_elements() -> None:
    costs: Costs = {
        "gather": LinearCost(1.0, 0.0),
        "star": LinearCost(0.0, 0.0),
        "direct": LinearCost(0.0, 0.0),
    }
    assert choose_algorithm(one_shard_each(4), 0, CHUNK, costs) == "gather"


def test_chain_for_hosts_with_many_shards() -> None:
    members = Members(0, (tuple(range(8)), tuple(range(8, 16))), 16)
    costs = make_costs(100e-6, 1.2e9, 2, 8)
    assert choose_algorithm(members, 100_000_000, CHUNK, costs) == "chain"
    scattered = Members(0, (tuple(range(0, 16, 2)), tuple(range(1, 16, 2))), 16)
    assert choose_algorithm(scattered, 100_000_000, CHUNK, costs) == "direct"
