"""Who moves where when data has moved or a node is to leave, without processes."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_machine import PS, W0, W1, W2, JobRun, logged, running, signals

from insitu.base.progress import Progress
from insitu.base.roster import RECOVERING
from insitu.base.spec import CacheSpec, NodeId, PartitionInfo, ShardMap, TaskId
from insitu.cluster.decide.events import (
    DataMovedEvent,
    Launch,
    LeaveEvent,
    MoveEvent,
    Publish,
    ReadyEvent,
    RecoveredEvent,
    TickEvent,
)
from insitu.cluster.decide.moves import MOVE_GRACE, Ownership, find_ownership, plan_moves
from insitu.cluster.decide.recovery_progress import find_disconnected

A, B, C, D = map(NodeId, "abcd")
TERM = -signal.SIGTERM


def three(*nodes: NodeId, **options: Any) -> JobRun:
    """Three workers that run on `nodes`, one shard each."""
    run = running(W0, W1, W2, **options)
    place(run, dict(zip((W0, W1, W2), nodes, strict=True)))
    return run


def place(run: JobRun, tasks: dict[TaskId, NodeId]) -> None:
    run.state = run.state.with_task(*(replace(run.state.task(t), node=node) for t, node in tasks.items()))


def own(*owners: str, rows: int = 10) -> Ownership:
    """Where rows are: for each shard the owners of its two partitions, primaries first."""
    shards = tuple((2 * s, 2 * s + 1) for s in range(len(owners)))
    infos = [
        PartitionInfo(i, rows, 100, "", tuple(map(NodeId, word)))
        for i, word in enumerate(word for each in owners for word in each.split())
    ]
    cache = CacheSpec("c", 1, (), tuple(infos), 0, None, 0.0)
    return find_ownership(ShardMap("c", 1, shards), [A] * len(owners), cache)


def move(run: JobRun, moves: dict[TaskId, NodeId], elastic: tuple[TaskId, ...] = (W0, W1, W2)) -> list[Any]:
    return run.feed(MoveEvent(tuple(moves.items()), "its data has moved", (0, 3), elastic))


def test_shards_follow_the_primary_owners_of_most_rows() -> None:
    found = own("ab bc", "cb ca")
    assert found.holders == ((A, B, C), (C, A, B)) and found.held[1] == {C: 20, B: 10, A: 10}
    assert found.owned == {A: 10, B: 10, C: 20}
    assert own("ba ab").holders == ((A, B),)  # the home stays where no other has more


@pytest.mark.parametrize(
    ("nodes", "ownership", "leaving", "moves"),
    [
        # A node joined, and holds as much as the others: only who shares a node moves.
        ((A, B, C), own("a d", "b b", "c c"), (), {}),
        ((A, A, C), own("a a", "a d", "c d"), (), {W1: D}),
        # Its node holds less than half, and another one has room and holds more.
        ((A, B, C), own("a a", "d d", "c c"), (), {W1: D}),
        ((A, B, C), own("a a", "b d", "c c"), (), {}),
        # A node that leaves loses all its tasks, also where nobody has their data yet.
        ((A, B, B), own("a a", "b b", "bc bd"), (B,), {W1: D, W2: C}),
        ((A, B, C), own("a a", "b b", "c c"), (B,), {W1: A}),
        ((A, B, C), Ownership((), (), {}), (C,), {W2: D}),
        ((A, A, A), Ownership((), (), {}), (), {}),
        # It is no use to move where rows are unequal from the start, as a new job would have it.
        ((A, A, B), own("a a", "a a", "b b"), (), {}),
        # Two that share a node are no more than others would have to, whose primary owner it isn't.
        ((A, B, B), own("a a", "ab ab", "ab ab"), (), {}),
    ],
)
def test_tasks_move_where_it_pays(
    nodes: tuple[NodeId, ...], ownership: Ownership, leaving: tuple[NodeId, ...], moves: dict[TaskId, NodeId]
) -> None:
    assert plan_moves(three(*nodes).state, ownership, {A, B, C, D}, leaving) == moves


owners = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map("".join)


@given(
    st.tuples(*[st.sampled_from([A, B, C, D])] * 3),
    st.lists(st.tuples(owners, owners).map(" ".join), min_size=3, max_size=3),
    st.sets(st.sampled_from([A, B, C, D]), max_size=3),
    st.sets(st.sampled_from([A, B, C, D])),
)
def test_moves_end_and_never_go_where_nothing_may_run(
    nodes: tuple[NodeId, ...], held: list[str], usable: set[NodeId], leaving: set[NodeId]
) -> None:
    run, ownership = three(*nodes), own(*held)
    for _ in range(4):
        moves = plan_moves(run.state, ownership, usable, leaving)
        assert set(moves.values()) <= usable - leaving
        if not moves:
            break
        place(run, moves)
    assert not plan_moves(run.state, ownership, usable, leaving)
    if usable - leaving:
        assert not {t.node for t in run.state.members} & leaving


def test_a_task_that_moves_is_stopped_and_started_there_and_counts_as_no_failure() -> None:
    run = three(A, A, C)
    actions = move(run, {W1: D})
    assert signals(actions) == [("worker:1", "term")] and "moves from a to d" in logged(actions)
    assert run.state.due == run.now + MOVE_GRACE
    actions = run.exits(W1, TERM, elastic=(W0, W2), progress=(0, 3))
    assert actions[-2:] == [Publish(2), Launch((W1,))]
    task = run.state.task(W1)
    assert (task.node, task.incarnation, task.move_to, run.state.failures) == (D, 2, None, 0)
    assert run.feed(RecoveredEvent(2), 1.5)
    (recovery,) = run.state.recoveries
    assert (recovery.how, recovery.text) == ("moved", "worker:1 moved from a to d")
    assert recovery.ended == run.now


def test_with_adopt_the_others_run_its_shards_until_it_is_there() -> None:
    run = three(A, A, C, on_loss="adopt")
    move(run, {W1: D})
    actions = run.exits(W1, TERM, elastic=(W0, W2), progress=(0, 3))
    assert actions[-2:] == [Publish(2), Launch((W1,))]
    assert sorted(s for t in run.state.members for s in t.shards) == [0, 1, 2]
    assert [t.task for t in run.state.members] == [W0, W2]
    run.feed(ReadyEvent((W1,), (0, 5)))
    assert run.state.task(W1).shards and run.state.task(W1).node == D


def test_one_that_has_the_state_stays_until_another_has_it() -> None:
    run = three(A, B, C)
    assert len(signals(move(run, {W0: D, W1: D, W2: D}))) == 2
    assert run.state.task(W0).move_to is None
    run = three(A, B, C)
    assert not move(run, {W0: D}, elastic=(W0,)) and not move(run, {W0: A})


@pytest.mark.parametrize("why", ["restart", "stopping", "dead", "alone"])
def test_nothing_moves_while_others_could_not_go_on(why: str) -> None:
    run = three(A, B, C, on_loss="restart" if why == "restart" else "replace")
    if why == "stopping":
        run.exits(W0, 1, elastic=())
    elif why == "dead":
        run.exits(W0, -9, elastic=(W1, W2), progress=(0, 1))
        run.exits(W0, -9, elastic=(W1, W2), progress=(0, 1))
    elif why == "alone":
        run = running(W0)
    assert move(run, {W0 if why == "alone" else W2: D}) == []


def test_who_cannot_go_on_without_others_keeps_them_where_they_are() -> None:
    assert move(three(A, B, C), {W1: D}, elastic=(W0, W1)) == []
    run = three(A, B, C)
    run.exits(W2, -9, elastic=(W0, W1), progress=(0, 1))  # its replacement comes into what the others do
    assert signals(move(run, {W1: D}, elastic=(W0, W1))) == [("worker:1", "term")]


def test_a_task_whose_new_node_is_lost_meanwhile_stays() -> None:
    run = three(A, B, C)
    move(run, {W1: D})
    run.state = replace(run.state, lost_nodes=(D,))
    run.exits(W1, TERM, elastic=(W0, W2), progress=(0, 3))
    assert run.state.task(W1).node == B


def test_workers_of_parameter_servers_move_alone() -> None:
    run = running(W0, PS)
    assert not signals(move(run, {W0: D}, elastic=(W0,)))
    run = running(W0, W1, PS)
    assert signals(move(run, {W1: D}, elastic=(W0, W1)))


def test_a_move_whose_others_die_starts_all_again_elsewhere() -> None:
    run = three(A, B, C)
    move(run, {W1: D})
    actions = run.exits(W1, TERM, elastic=(), progress=(0, 3))
    assert run.state.phase == "stopping" and signals(actions)


def test_a_task_that_does_not_end_is_killed_and_still_moves() -> None:
    run = three(A, B, C)
    move(run, {W1: D})
    assert signals(run.feed(TickEvent(), MOVE_GRACE)) == [("worker:1", "kill")]
    run.exits(W1, -9, elastic=(W0, W2))
    assert run.state.task(W1).node == D


def test_a_script_that_ends_well_meanwhile_has_ended() -> None:
    run = three(A, B, C)
    move(run, {W1: D})
    run.exits(W1, 0, elastic=(W0, W2))
    assert run.state.task(W1).has_ended_well and run.state.task(W1).move_to is None


def test_others_that_wait_for_a_task_that_moves_have_not_lost_the_connection() -> None:
    run = three(A, B, C)
    waiting = {W0: Progress(0, 3, place=RECOVERING, elastic=True, generation=1)}
    assert find_disconnected(run.state, waiting) == (W0,)
    move(run, {W1: D})
    assert find_disconnected(run.state, waiting) == ()


def test_what_is_launched_next_goes_where_data_lies_and_nothing_leaves() -> None:
    run = three(A, B, C)
    run.feed(DataMovedEvent(((A,), (D, B), (C,)), (B,)))
    run.exits(W1, -9, elastic=(W0, W2), progress=(0, 1))
    assert run.state.task(W1).node == D and run.state.holders[1] == (D, B)
    assert run.feed(DataMovedEvent((), ())) == [] and run.state.holders[1] == (D, B)


def test_tasks_that_cannot_move_start_again_elsewhere_before_their_node_leaves() -> None:
    run = three(A, B, C)
    run.feed(DataMovedEvent(((A,), (D, B), (C,)), (B,)))
    assert run.feed(LeaveEvent(D)) == []
    actions = run.feed(LeaveEvent(B, (0, 3)))
    assert len(signals(actions)) == 3
    for task in (W0, W1, W2):
        run.exits(task, TERM)
    assert run.state.phase == "restarting" and "b leaves, and worker:1" in str(run.state.attempts[0].cause)
    run.tick()
    assert run.state.task(W1).node == D
