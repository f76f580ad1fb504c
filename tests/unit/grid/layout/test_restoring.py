"""Plans that make lost copies again give each partition what it lacks, and move nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import NodeId, PlacedCopy
from insitu.grid.layout import plan_restoring
from insitu.grid.layout.restoring import _list_given_up

A, B, C, D = NODES = tuple(map(NodeId, "abcd"))


def placed(*owners: str) -> list[PlacedCopy]:
    return [PlacedCopy(p, NodeId(node)) for p, nodes in enumerate(owners) for node in nodes]


def apply(copies: Sequence[PlacedCopy], plan: object) -> set[tuple[int, NodeId]]:
    found = {(copy.partition, copy.node) for copy in copies if copy.state != "copying"}
    found |= {(move.partition, move.target) for move in plan.moves}  # type: ignore[attr-defined]
    found -= {(move.partition, move.replaced) for move in plan.moves}  # type: ignore[attr-defined]
    return found - set(plan.drops)  # type: ignore[attr-defined]


def test_a_lost_node_gives_its_copies_to_those_that_have_least() -> None:
    copies = placed("ab", "bc", "ca", "aa"[:1])
    plan = plan_restoring(copies, dict.fromkeys(range(4), 10), [A, B, D], 1)
    assert [(m.partition, m.target, m.replaced) for m in plan.moves] == [(1, D, C), (2, D, C), (3, B, None)]
    assert plan.owners[1] == (B, D) and plan.owners[2] == (A, D) and plan.owners[0] == (A, B)


def test_a_node_that_may_come_back_keeps_its_copies() -> None:
    copies, sizes = placed("ab", "ca"), {0: 10, 1: 10}
    plan = plan_restoring(copies, sizes, [A, B, D], 1, waiting=[C])
    assert not plan.moves and not plan.drops
    assert plan_restoring(placed("c"), {0: 10}, [A], 0).unavailable == (0,)
    assert plan_restoring(placed("c"), {0: 10}, [A], 0, waiting=[C]).unavailable == ()


def test_a_node_that_leaves_gives_its_only_copy_away_and_keeps_it_where_nobody_stays() -> None:
    plan = plan_restoring(placed("a", "b"), {0: 10, 1: 10}, [A, B], 0, leaving=[A])
    assert [(m.partition, m.source, m.target, m.replaced) for m in plan.moves] == [(0, A, B, A)]
    assert plan_restoring(placed("a"), {0: 10}, [A], 0, leaving=[A]).owners == {0: (A,)}
    # With fewer nodes than copies others have all that they can have.
    plan = plan_restoring(placed("ab"), {0: 10}, [A, B], 1, leaving=[A])
    assert plan.drops == ((0, A),) and plan.owners == {0: (B,)} and not plan.moves


def test_what_a_lost_node_has_counts_where_no_other_has_room_for_it() -> None:
    plan = plan_restoring(placed("ab"), {0: 10}, [A], 1)
    assert not plan.moves and not plan.drops and plan.owners == {0: (A, B)}


def test_others_take_the_place_of_copies_that_leave_then_of_lost_ones() -> None:
    copies = [PlacedCopy(0, A), PlacedCopy(0, B, "lost"), PlacedCopy(0, C), PlacedCopy(0, D, "copying")]
    assert _list_given_up(copies, 0, (), leaving=[C]) == [C, B, A]


some = st.sets(st.sampled_from(NODES))


@given(
    st.lists(st.lists(st.sampled_from(NODES), min_size=1, unique=True), min_size=1, max_size=6),
    st.integers(0, 3),
    some,
    some,
    some,
    st.data(),
)
def test_each_partition_gets_what_it_lacks_and_nothing_else_moves(
    owners: list[list[NodeId]],
    backups: int,
    nodes: set[NodeId],
    leaving: set[NodeId],
    waiting: set[NodeId],
    data: st.DataObject,
) -> None:
    copies = [PlacedCopy(p, node) for p, holders in enumerate(owners) for node in holders]
    sizes = {p: data.draw(st.integers(0, 5)) for p in range(len(owners))}
    waiting -= nodes
    plan = plan_restoring(copies, sizes, nodes, backups, leaving=leaving, waiting=waiting)
    after, staying = apply(copies, plan), nodes - leaving
    for partition, holders in enumerate(owners):
        now = {node for p, node in after if p == partition}
        assert now, "a partition never loses its last copy"
        if not nodes & set(holders):
            assert now == set(holders)
            continue
        assert set(plan.owners[partition]) == now
        counted = now & (staying | waiting - leaving)
        kept = set(holders) & (staying | waiting - leaving)
        free = len(staying - set(holders))
        assert len(counted) == max(len(kept), min(backups + 1, len(kept) + free))
        if counted:
            assert not now & leaving
        assert kept <= now
    for move in plan.moves:
        assert move.source in nodes and move.source in owners[move.partition]
        assert move.target in staying and move.target not in owners[move.partition]
    remaining = [PlacedCopy(p, node) for p, nodes_ in plan.owners.items() for node in nodes_]
    remaining += [c for c in copies if c.partition not in plan.owners]
    again = plan_restoring(remaining, sizes, nodes, backups, leaving=leaving, waiting=waiting)
    assert not again.moves and not again.drops
