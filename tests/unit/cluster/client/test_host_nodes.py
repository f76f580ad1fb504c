from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from agent_facts import LOAD, facts

from insitu.base.errors import ClusterError, JobSpecError, PlacementError
from insitu.base.paths import Paths
from insitu.base.spec import (
    CacheSpec,
    Column,
    NodeId,
    PartitionInfo,
    Placement,
    ShardMap,
    TaskId,
    TaskSpec,
    Topology,
)
from insitu.cluster import nodes, wire
from insitu.cluster.client import host_nodes
from insitu.cluster.client.host_nodes import (
    HostNodes,
    check_cores,
    check_gpus,
    check_memory,
    check_reach,
    choose_host_threads,
    choose_nodes,
    find_host_nodes,
    prefer_live_owners,
)
from insitu.cluster.decide import Member
from insitu.cluster.wire.records import HeadRecord

A, B, C = map(NodeId, "abc")


def member(node: str, state: str = "alive", cores: int = 4) -> Member:
    alive = state in ("alive", "silent")
    return Member(facts(node, cores=cores), LOAD, state, 0.0, 0.0, 1 if alive else None, 0.0)  # type: ignore[arg-type]


def cache(*owners: tuple[NodeId, ...]) -> CacheSpec:
    partitions = tuple(PartitionInfo(i, 10, 100, "sum", nodes) for i, nodes in enumerate(owners))
    return CacheSpec("data", 1, (Column("x", "float32", ()),), partitions, 10, None, 0.0)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path)


def let_be(monkeypatch: pytest.MonkeyPatch, *members: Member) -> None:
    monkeypatch.setattr(host_nodes, "read_head", lambda paths: HeadRecord("cluster"))
    monkeypatch.setattr(wire, "read_nodes", lambda paths: (list(members), ""))


def test_a_home_without_agents_runs_tasks_itself(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    let_be(monkeypatch)
    assert find_host_nodes(paths, "", None) is None and find_host_nodes(paths, "local", None) is None
    with pytest.raises(ClusterError, match="is for the home of a head"):
        find_host_nodes(paths, "hosts", None)


def test_the_home_of_an_agent_runs_tasks_itself(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    let_be(monkeypatch, member("a"))
    monkeypatch.setattr(host_nodes, "read_head", lambda paths: None)
    assert find_host_nodes(paths, "", None) is None


def test_tasks_run_where_agents_are_alive(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    let_be(monkeypatch, member("b"), member("a"), member("c", "lost"))
    found = find_host_nodes(paths, "", None)
    assert found is not None and found.topology == Topology((A, B)) and found.away == {C: "lost"}
    assert find_host_nodes(paths, "local", None) is None
    let_be(monkeypatch, member("c", "lost"))
    with pytest.raises(ClusterError, match=r"none of c\. .* --engine local"):
        find_host_nodes(paths, "", None)
    let_be(monkeypatch, member("c", "left"))  # taken down
    assert find_host_nodes(paths, "", None) is None


def test_a_cache_says_where_its_tasks_run(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    let_be(monkeypatch, member("a"), member("b", "lost"))
    assert find_host_nodes(paths, "", cache((NodeId("node-0"),))) is None  # of this machine
    assert find_host_nodes(paths, "", cache((A, B), (B, A))) is not None
    with pytest.raises(PlacementError, match=r"1 partition is on b \(lost\) alone"):
        find_host_nodes(paths, "", cache((A, B), (B,)))


def test_owners_that_are_away_come_last() -> None:
    found = prefer_live_owners(cache((B, A), (A, B), (C, B)), Topology((A, C)))
    assert [p.owners for p in found.partitions] == [(A, B), (A, B), (C, B)]


def test_pairs_that_cannot_talk_are_named_where_the_job_needs_them(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [("a", "b", "refused"), ("c", "a", "no route"), ("this machine", "a", "timed out")]
    monkeypatch.setattr(nodes, "find_separated", lambda paths: pairs)
    check_reach(paths, {A})
    check_reach(paths, {B, C})
    with pytest.raises(ClusterError, match="a can't reach b: refused") as caught:
        check_reach(paths, {A, B})
    assert "no route" not in str(caught.value)


def test_threads_are_those_of_the_fullest_host() -> None:
    tasks = (
        TaskSpec(TaskId("worker", 0), A, (0,)),
        TaskSpec(TaskId("worker", 1), A, (1,)),
        TaskSpec(TaskId("worker", 2), B, (2,)),
        TaskSpec(TaskId("ps", 0), B),
    )
    placement = Placement(tasks, ShardMap("data", 1, ((0,), (1,), (2,))), (A, A, B))
    assert choose_host_threads(placement, {A: 8, B: 3}) == 3
    assert choose_host_threads(placement, {A: 4, B: 3}) == 2
    assert choose_host_threads(replace(placement, tasks=tasks[:2]), {A: 1}) == 1


def test_nodes_with_too_few_gpus_or_too_little_memory_are_named(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = (
        TaskSpec(TaskId("worker", 0), A, (0,)),
        TaskSpec(TaskId("worker", 1), A, (1,)),
        TaskSpec(TaskId("worker", 2), B, (2,)),
        TaskSpec(TaskId("ps", 0), C),
    )
    placement = Placement(tasks, ShardMap("data", 1, ((0,), (1,), (2,))), (A, A, B))
    let_be(monkeypatch, member("a"), member("b"), member("c"))
    found = find_host_nodes(paths, "", None)
    assert found is not None and found.gpus == {A: 1, B: 1, C: 1}
    check_gpus(placement, 1, {A: 2, B: 1})
    with pytest.raises(PlacementError, match=r"and a can give 1 to 2 tasks\. Start fewer"):
        check_gpus(placement, 1, found.gpus)
    check_memory(placement, 10, {A: 20 << 20, B: 10 << 20})
    with pytest.raises(PlacementError, match=r"10, in MiB, and a has 19 MiB free for 2 tasks; b has 0"):
        check_memory(placement, 10, {A: (20 << 20) - 1, C: 1 << 40})
    assert found.memory == {A: 1, B: 1, C: 1}
    check_cores(placement, 2, {A: 4, B: 2})
    with pytest.raises(PlacementError, match=r"--cores-per-worker 2, and a has 3 for 2 tasks; b has 0"):
        check_cores(placement, 2, {A: 3})


def test_a_job_may_be_bound_to_nodes_that_hold_all_of_its_cache() -> None:
    here = Topology((A, B, C))
    data = cache((A, B), (B, A), (B,))
    assert choose_nodes(here, ["b", "a"], data) == Topology((A, B)) == choose_nodes(here, ["a", "b"], None)
    with pytest.raises(PlacementError, match=r"1 of 3 partitions of data is on b alone"):
        choose_nodes(here, ["a"], data)
    with pytest.raises(JobSpecError, match=r"that are up: a, b, c\. Received: d"):
        choose_nodes(here, ["a", "d"], data)
    hosts = HostNodes({A: 4, B: 8}, {A: 1, B: 2}, {A: 5, B: 6}, {C: "lost"})
    assert hosts.restrict_to(Topology((B,))) == HostNodes({B: 8}, {B: 2}, {B: 6}, {C: "lost"})
