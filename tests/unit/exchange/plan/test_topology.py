"""Ranks by host, and their lanes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.exchange.plan.topology import HostTopology
from insitu.exchange.plan.transport import Members

SHARDS = ((0, 5), (1,), (2, 3), (), (4,))
RANKS = ((0, 2, 4), (1, 3))


def _see_from(rank: int) -> HostTopology:
    return HostTopology(Members(rank, SHARDS, 6), RANKS)


def test_ranks_are_matched_in_lanes() -> None:
    assert [_see_from(rank).own_lane for rank in range(5)] == [(0, 1), (0, 1), (2, 3), (2, 3), ()]
    assert [_see_from(rank).local_rank for rank in range(5)] == [0, 0, 1, 1, 2]
    assert _see_from(3).local_ranks == (1, 3)


def test_hosts_as_members_have_the_shards_of_their_ranks() -> None:
    assert _see_from(3).make_host_members() == Members(1, ((0, 2, 3, 4, 5), (1,)), 6)


def test_local_shards_are_numbered_from_0() -> None:
    assert _see_from(2).make_local_members() == Members(1, ((0, 4), (1, 2), (3,)), 5)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.data())
def test_every_shard_is_on_one_host(host_of: list[int], data: st.DataObject) -> None:
    hosts = sorted(set(host_of), key=host_of.index)
    ranks = tuple(tuple(r for r, h in enumerate(host_of) if h == host) for host in hosts)
    rank = data.draw(st.integers(0, len(host_of) - 1))
    topology = HostTopology(Members(rank, tuple((r,) for r in range(len(host_of))), len(host_of)), ranks)
    assert sorted(shard for shards in topology.shards for shard in shards) == list(range(len(host_of)))
    assert rank in topology.local_ranks
    assert topology.make_local_members().num_shards == len(topology.local_ranks)
    assert not topology.own_lane or rank in topology.own_lane
