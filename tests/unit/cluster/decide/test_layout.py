"""Who runs which shards when workers come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import CacheSpec, NodeId, PartitionInfo, ShardMap, TaskId
from insitu.cluster.decide.layout import (
    assign_contiguous_shards,
    choose_node,
    find_shard_holders,
    find_successors,
    reassign,
)

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
W = [TaskId("worker", i) for i in range(6)]


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_every_shard_is_run_once_and_loads_differ_by_one_at_most(
    workers: int, total: int, data: st.DataObject
) -> None:
    holders = tuple(
        tuple(data.draw(st.permutations([A, B, C]))[: data.draw(st.integers(1, 3))]) for _ in range(total)
    )
    before = assign_contiguous_shards(data.draw(st.integers(1, min(6, total))), total)
    held = {W[i]: before[i] if i < len(before) else () for i in range(workers)}
    nodes = {w: data.draw(st.sampled_from([A, B, C])) for w in held}
    after = reassign(held, nodes, holders)
    assert sorted(s for shards in after.values() for s in shards) == list(range(total))
    loads = sorted(map(len, after.values()))
    assert loads[-1] - loads[0] <= 1
    for worker, shards in after.items():
        # Nobody lets go of a shard while it has room for more.
        if len(held[worker]) <= loads[0]:
            assert set(held[worker]) <= set(shards)


def test_holders_of_a_shard_come_in_the_order_of_its_rows_behind_its_home() -> None:
    owners = ((10, (A, B)), (30, (B, C)), (30, (C,)))
    partitions = tuple(PartitionInfo(i, rows, 1, "", nodes) for i, (rows, nodes) in enumerate(owners))
    cache = CacheSpec("c", 1, (), partitions, 0, None, 0.0)
    assert find_shard_holders(ShardMap("c", 1, ((0, 1, 2), (0,))), [A, C], cache) == ((A, C, B), (C, A, B))


def test_an_orphan_goes_to_who_holds_its_backup() -> None:
    holders = ((A, B), (B, C), (C, A))
    assert reassign({W[0]: (0,), W[2]: (2,)}, {W[0]: A, W[2]: C}, holders) == {W[0]: (0,), W[2]: (1, 2)}


def test_who_comes_back_gets_the_shard_at_home_there() -> None:
    holders = ((A, B), (B, C), (C, A))
    held = {W[0]: (0,), W[1]: (), W[2]: (1, 2)}
    assert reassign(held, {W[0]: A, W[1]: B, W[2]: C}, holders) == {W[0]: (0,), W[1]: (1,), W[2]: (2,)}


def test_shards_are_run_where_they_are_at_home_or_have_a_backup() -> None:
    holders = ((A, B), (A,), (B, C))
    assert choose_node((0, 1, 2), holders) == A
    assert choose_node((0, 2), holders, lost=(A,)) == B
    assert choose_node((2,), holders, lost=(B,)) == C
    assert choose_node((1,), holders, lost=(A,)) is None


def test_each_node_would_get_what_the_loss_of_another_leaves() -> None:
    holders = ((A, B), (B, C), (C, B))
    running = ((A, {0}), (B, {1}), (C, {2}), (C, ()))
    assert find_successors(running, holders) == {B: {0, 2}, C: {1}}
    assert find_successors(running, holders, lost=[B]) == {C: {1}}
    for node, shards in running[:3]:
        choice = choose_node(sorted(shards), holders, [node])
        assert choice is not None and shards <= find_successors(running, holders)[choice]
