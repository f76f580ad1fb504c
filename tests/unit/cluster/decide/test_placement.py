"""Jobs laid out on nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import JobSpecError, PlacementError
from insitu.base.spec import NO_CACHE, CacheSpec, Column, JobSpec, NodeId, PartitionInfo, TaskId, Topology
from insitu.cluster.decide.placement import (
    apportion,
    choose_home_nodes,
    choose_thread_count,
    choose_worker_count,
    make_empty_cache,
    place_tasks,
)

NODES = tuple(NodeId(f"node-{i}") for i in range(3))
TOPOLOGY = Topology(NODES)


def cache(owners: list[int], rows: list[int] | None = None) -> CacheSpec:
    partitions = tuple(
        PartitionInfo(i, 10 if rows is None else rows[i], 100, "crc32:0", (NODES[owner],))
        for i, owner in enumerate(owners)
    )
    return CacheSpec("digits/train", 3, (Column("x", "uint8", (4,)),), partitions, 0, None, 0.0)


def job(workers: int, shards: int | None = None, **more: object) -> JobSpec:
    shards = workers if shards is None else shards
    return JobSpec("j-1", "j", "digits/train", ("train.py",), workers, shards, **more)  # type: ignore[arg-type]


def test_one_worker_for_each_node_that_owns_data() -> None:
    assert choose_worker_count(cache([0, 0, 2, 2]), TOPOLOGY) == 2


def test_workers_run_beside_the_partitions_that_they_read() -> None:
    placement = place_tasks(job(3), cache([0, 0, 1, 1, 2, 2]), TOPOLOGY)
    assert [(t.node, t.shards) for t in placement.tasks] == [(n, (i,)) for i, n in enumerate(NODES)]
    assert placement.shard_map.shards == ((0, 1), (2, 3), (4, 5))
    assert placement.home_nodes == NODES
    assert (placement.shard_map.cache, placement.shard_map.version) == ("digits/train", 3)


def test_shards_do_not_depend_on_how_many_workers_run_them() -> None:
    held = cache([0, 1, 2, 0, 1, 2])
    many, one = place_tasks(job(3, 3), held, TOPOLOGY), place_tasks(job(1, 3), held, TOPOLOGY)
    assert many.shard_map == one.shard_map and many.home_nodes == one.home_nodes
    assert one.tasks[0].shards == (0, 1, 2)


def snapshot(primaries: list[int], rows: list[int], nodes: int) -> CacheSpec:
    """Partitions of Ignite, on the nodes beside their servers."""
    made = cache([server % nodes for server in primaries], rows)
    servers = [f"server {number}" for number in range(max(primaries) + 1)]
    return replace(made, origin={"servers": servers, "primaries": list(primaries)})


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=4, max_size=24),
    st.integers(1, 4),
)
def test_shards_of_a_snapshot_follow_from_its_servers_alone(
    partitions: list[tuple[int, int]], shards: int
) -> None:
    primaries, rows = [server for server, _ in partitions], [count for _, count in partitions]
    laid = [
        place_tasks(job(1, shards), snapshot(primaries, rows, nodes), Topology(NODES[:nodes]))
        for nodes in (1, 2, 3)
    ]
    assert len({placement.shard_map.shards for placement in laid}) == 1
    for nodes, placement in enumerate(laid, start=1):
        assert set(placement.home_nodes) <= set(NODES[:nodes])


def test_a_worker_beside_each_server_reads_its_partitions_alone() -> None:
    primaries = [0, 2, 1, 1, 0, 2]
    placement = place_tasks(job(3), snapshot(primaries, [10] * 6, 3), TOPOLOGY)
    assert placement.shard_map.shards == ((0, 4), (2, 3), (1, 5)) and placement.home_nodes == NODES
    # What was appended later isn't of these servers.
    other = replace(snapshot(primaries, [10] * 6, 3), origin={"servers": ["a"], "primaries": [0]})
    assert place_tasks(job(3), other, TOPOLOGY).shard_map.shards == ((0, 4), (2, 3), (1, 5))


def test_all_roles_are_placed_in_order() -> None:
    placement = place_tasks(job(2, ps=4, chief=True, evaluator=True), cache([1, 1, 2, 2]), TOPOLOGY)
    assert [(str(t.task), t.node) for t in placement.tasks] == [
        ("chief:0", "node-1"),
        ("worker:0", "node-1"),
        ("worker:1", "node-2"),
        ("ps:0", "node-0"),
        ("ps:1", "node-1"),
        ("ps:2", "node-2"),
        ("ps:3", "node-0"),
        ("evaluator:0", "node-1"),
    ]
    assert all(not t.shards for t in placement.tasks if t.task.role != "worker")


def test_workers_are_spread_by_rows() -> None:
    held = cache([0, 0, 0, 1, 2, 2], rows=[300, 300, 300, 300, 0, 10])
    assert choose_home_nodes(6, held, TOPOLOGY) == (*[NODES[0]] * 4, NODES[1], NODES[2])


def test_more_workers_than_partitions_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"2 partitions, fewer than the 3 shards.*--partitions 3"):
        place_tasks(job(3), cache([0, 1]), TOPOLOGY)


def test_a_node_that_is_gone_is_named() -> None:
    with pytest.raises(PlacementError, match="is on node-2"):
        place_tasks(job(1), cache([0, 2]), Topology(NODES[:2]))
    with pytest.raises(PlacementError, match="is on node-2"):
        place_tasks(job(1), snapshot([0, 2], [1, 1], 3), Topology(NODES[:2]))


def test_a_job_without_workers_is_refused() -> None:
    for workers, more in ((1, {}), (2, {"ps": 1})):
        with pytest.raises(JobSpecError, match=r"--memory-checkpoint is for workers that train in step"):
            JobSpec("j-1", "j", "digits/train", ("t.py",), workers, workers, memory_checkpoint=True, **more)
    with pytest.raises(JobSpecError, match=r"--workers must be at least 1. Received: 0"):
        job(0)


def test_threads_divide_the_cores_among_those_that_compute() -> None:
    assert choose_thread_count(8, 2, evaluator=False) == 4
    assert choose_thread_count(8, 2, evaluator=True) == 2
    assert choose_thread_count(2, 5, evaluator=False) == 1


@given(
    owners=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    data=st.data(),
)
def test_each_partition_is_trained_on_once_and_no_worker_is_idle(
    owners: list[int], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(1, 50), min_size=len(owners), max_size=len(owners)))
    shards = data.draw(st.integers(1, len(owners)))
    workers = data.draw(st.integers(1, shards))
    placement = place_tasks(job(workers, shards), cache(owners, rows), TOPOLOGY)
    assert sorted(p for s in placement.shard_map.shards for p in s) == list(range(len(owners)))
    assert all(placement.shard_map.shards)
    assert [s for t in placement.tasks for s in t.shards] == list(range(shards))
    assert all(t.shards for t in placement.tasks)
    assert {t.node for t in placement.tasks} <= {NODES[o] for o in owners}
    assert [t.task for t in placement.tasks] == [TaskId("worker", w) for w in range(workers)]


@given(st.integers(1, 20), st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_shares_add_up_and_leave_nobody_out(count: int, weights: list[int]) -> None:
    shares = apportion(count, weights)
    assert sum(shares) == count
    assert Counter(s == 0 for s in shares)[True] == max(0, len(weights) - count)


def test_the_heaviest_come_first_and_shares_follow_the_weights() -> None:
    assert apportion(2, [1, 5, 3]) == [0, 1, 1] and apportion(1, [4, 4]) == [1, 0]
    assert apportion(8, [50, 30, 0]) == [5, 2, 1] and apportion(4, [0, 0, 0]) == [2, 1, 1]


def test_a_job_without_a_cache_has_its_shards_on_the_nodes_in_turn() -> None:
    without = make_empty_cache(4, TOPOLOGY)
    assert CacheSpec.from_json(without.to_json()) == without and without.rows == 0
    placement = place_tasks(JobSpec("j-1", "j", NO_CACHE, ("train.py",), 2, 4), without, TOPOLOGY)
    assert [t.shards for t in placement.tasks] == [(0, 1), (2, 3)]
    assert sorted(p for shard in placement.shard_map.shards for p in shard) == [0, 1, 2, 3]
    assert set(placement.home_nodes) == set(NODES)
