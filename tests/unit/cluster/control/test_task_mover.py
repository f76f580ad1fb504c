"""When the tasks of a job follow their data, with a catalogue and a list of nodes but no hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from agent_facts import LOAD, WALL, facts

from insitu.base.disk.durable import seal
from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import (
    CacheSpec,
    JobSpec,
    NodeId,
    PartitionInfo,
    PlacedCopy,
    Placement,
    ShardMap,
    TaskId,
    TaskSpec,
)
from insitu.cluster.control.task_mover import AWAY_SECONDS, STEADY_SECONDS, TaskMover
from insitu.cluster.decide import DataMovedEvent, JobState, LeaveEvent, Member, MoveEvent, new_job
from insitu.cluster.decide.events import SubmittedEvent
from insitu.cluster.decide.job import advance
from insitu.grid import Catalog

A, B, C = map(NodeId, "abc")
W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
TASKS = (TaskSpec(W0, A, (0,)), TaskSpec(W1, A, (1,)))
CACHE = CacheSpec("x", 1, (), tuple(PartitionInfo(i, 10, 100, "", (A,)) for i in range(4)), 40, None, 0.0)
PLACEMENT = Placement(TASKS, ShardMap("x", 1, ((0, 1), (2, 3))), (A, A))


class Cluster:
    """A home whose catalogue and list of nodes a test changes, and a job that looks there."""

    def __init__(self, home: Path, **spec: Any) -> None:
        self.paths = Paths(home)
        job = JobPaths(self.paths.jobs / "j")
        job.root.mkdir(parents=True)
        self.catalog = Catalog(self.paths)
        self.catalog.publish([CACHE])
        self.asked: list[TaskSpec] = []
        self.problem = ""
        settings = {"engine": "hosts", "workers": 2, "shards": 2, **spec}
        self.spec = JobSpec("j", "j", "x", ("train.py",), **settings)
        self.mover = TaskMover(job, self.spec, PLACEMENT, CACHE, self)  # type: ignore[arg-type]
        self.output = job.output
        self.state: JobState = new_job(TASKS, 3, holders=((A,), (A,)))
        self.state = advance(self.state, SubmittedEvent(), 0.0)[0]
        self.now = 100.0
        self.note_nodes(A, B)

    def prepare(self, tasks: Sequence[TaskSpec]) -> bool:
        self.asked += tasks
        if self.problem:
            raise ClusterError(self.problem)
        return True

    def note_nodes(
        self, *nodes: NodeId, leaving: Mapping[NodeId, float] | None = None, other: NodeId | None = None
    ) -> None:
        members = []
        for number, node in enumerate(nodes):
            found = facts(node)
            if node == other:
                found = replace(found, processor="another one")
            member = Member(found, LOAD, "alive", WALL, 0.0, number, 0.0, (leaving or {}).get(node))
            members.append(asdict(member))
        self.paths.members.write_bytes(seal(members))

    def place(self, *owners: str, copying: bool = False) -> None:
        copies = [PlacedCopy(p, NodeId(node)) for p, word in enumerate(owners) for node in word]
        copies += [PlacedCopy(0, C, "copying")] * copying
        self.catalog.change_placement("x", 1, lambda before: copies)

    def look(self, after: float = 0.0) -> Any:
        self.now += after
        event = self.mover.advance(self.state, (W0, W1), (0, 3), self.now)
        if event is not None:
            self.state, _ = advance(self.state, event, self.now)
        return event

    def settle(self) -> Any:
        """Look, and again when owners have stayed the same."""
        return self.look(2.0) or self.look(STEADY_SECONDS)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_nothing_moves_while_nothing_has(cluster: Cluster) -> None:
    assert cluster.settle() is None and cluster.settle() is None and cluster.asked == []


def test_a_worker_follows_when_owners_have_stayed_the_same_for_a_while(cluster: Cluster) -> None:
    cluster.settle()
    cluster.place("a", "a", "b", "b", copying=True)
    assert cluster.settle() is None, "a copy is on its way"
    cluster.place("a", "a", "b", "b")
    assert cluster.look(1.5) is None
    assert cluster.look(STEADY_SECONDS) == DataMovedEvent(((A,), (B,)))
    event = cluster.look(1.0)
    assert event == MoveEvent(((W1, B),), "its data has moved", (0, 3), (W0, W1))
    assert cluster.asked == [TaskSpec(W1, B, (1,))] and cluster.state.task(W1).move_to == B
    assert cluster.look(1.0) is None


def test_with_stay_it_is_only_noted_where_data_is(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, on_rebalance="stay")
    cluster.settle()
    cluster.place("a", "a", "b", "b")
    assert isinstance(cluster.settle(), DataMovedEvent)
    assert cluster.settle() is None and cluster.state.holders == ((A,), (B,))


def test_a_job_stays_on_the_nodes_that_it_was_given(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=(A, C))
    cluster.settle()
    cluster.place("ab", "ab", "b", "b")
    assert cluster.settle() is None and cluster.asked == []
    assert cluster.state.holders == ((A,), (A,))
    cluster.note_nodes(A, B, leaving={A: 9e9})
    assert cluster.settle() == DataMovedEvent(((A,), (A,)), (A,))
    assert cluster.look() is None, "b isn't one of them"


def test_workers_with_gpus_of_their_own_stay_and_leave_for_nodes_that_have_some(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, gpus_per_worker=2)
    cluster.settle()
    cluster.place("a", "a", "b", "b")
    assert isinstance(cluster.settle(), DataMovedEvent) and cluster.settle() is None
    cluster.note_nodes(A, B, leaving={A: 9e9})
    assert isinstance(cluster.settle(), DataMovedEvent)
    assert cluster.look() is None, "b has one GPU"


def test_tasks_leave_a_node_at_once_also_with_stay(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, on_rebalance="stay")
    cluster.settle()
    cluster.note_nodes(A, B, leaving={A: 9e9})
    assert cluster.look(1.5) == DataMovedEvent(((A,), (A,)), (A,))
    event = cluster.look()
    assert isinstance(event, MoveEvent) and event.reason == "a is to leave"
    assert {node for _, node in event.moves} == {B}


def test_a_node_that_is_not_ready_is_left_alone_for_a_while(cluster: Cluster) -> None:
    cluster.settle()
    cluster.place("a", "a", "b", "b")
    cluster.problem = "no agent"
    cluster.settle()
    assert cluster.look(1.0) is None and cluster.look(1.0) is None
    assert len(cluster.asked) == 1 and "b isn't ready: no agent" in cluster.output.read_text()
    cluster.problem = ""
    assert isinstance(cluster.look(AWAY_SECONDS), MoveEvent)


def test_no_shard_goes_to_another_processor(cluster: Cluster) -> None:
    cluster.note_nodes(A, B, other=B)
    cluster.settle()
    cluster.place("a", "a", "b", "b")
    assert isinstance(cluster.settle(), DataMovedEvent) and cluster.settle() is None


def test_what_cannot_move_starts_again_elsewhere_shortly_before_the_deadline(cluster: Cluster) -> None:
    cluster.settle()
    cluster.problem = "no agent"
    cluster.note_nodes(A, B, leaving={A: 0.0})
    assert isinstance(cluster.look(1.5), DataMovedEvent)
    assert cluster.look() == LeaveEvent(A, (0, 3))


def test_jobs_on_one_machine_do_not_look(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, engine="local")
    cluster.place("b", "b", "b", "b")
    assert cluster.settle() is None and cluster.settle() is None


def test_a_catalogue_that_cannot_be_read_is_read_later(cluster: Cluster) -> None:
    cluster.settle()
    good = cluster.paths.members.read_bytes()
    cluster.paths.members.write_bytes(b"torn")
    assert cluster.look(2.0) is None
    cluster.paths.members.write_bytes(good)
    cluster.place("a", "a", "b", "b")
    assert isinstance(cluster.settle(), DataMovedEvent)
