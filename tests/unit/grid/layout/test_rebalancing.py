"""Plans move the fewest bytes that any balanced placement needs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.base.spec import NodeId, PlacedCopy, Topology
from insitu.grid.layout import RebalancePlan, owners_of_partition, plan_rebalancing
from insitu.grid.layout.rebalancing import _removed

NODES = tuple(NodeId(f"node-{i}") for i in range(6))


def placed(owners: Mapping[int, Sequence[NodeId]]) -> list[PlacedCopy]:
    return [PlacedCopy(partition, node) for partition, nodes in owners.items() for node in nodes]


def imported(partitions: int, nodes: int, backups: int = 0) -> list[PlacedCopy]:
    """The copies of a cache as an import places them."""
    topology = Topology(NODES[:nodes])
    return placed({p: owners_of_partition(p, topology, backups) for p in range(partitions)})


def most_equal(choices: Sequence[Sequence[NodeId]]) -> int:
    """The least sum of squared numbers of primary owners, by trying all choices of one owner each."""
    return min(sum(n * n for n in Counter(chosen).values()) for chosen in itertools.product(*choices))


def check(plan: RebalancePlan, copies: Sequence[PlacedCopy], staying: Sequence[NodeId], backups: int) -> None:
    """What holds of every plan."""
    live = {(c.partition, c.node) for c in copies if c.state == "live"}
    load = Counter(dict.fromkeys(staying, 0))
    for nodes in plan.owners.values():
        assert len(nodes) == len(set(nodes)) == backups + 1 and set(nodes) <= set(staying)
        load.update(nodes)
    assert max(load.values()) - min(load.values()) <= 1
    primaries = Counter(nodes[0] for nodes in plan.owners.values())
    assert sum(n * n for n in primaries.values()) == most_equal(list(plan.owners.values()))
    for move in plan.moves:
        assert (move.partition, move.source) in live and (move.partition, move.target) not in live
        assert move.target in plan.owners[move.partition]
    made = {(move.partition, move.target) for move in plan.moves}
    removed = {(m.partition, m.replaced) for m in plan.moves if m.replaced} | set(plan.drops)
    assert len(made) == len(plan.moves)
    known = {(c.partition, c.node) for c in copies if c.state != "copying" and c.partition in plan.owners}
    final = {(p, node) for p, nodes in plan.owners.items() for node in nodes}
    assert (known | made) - removed == final


def fewest_bytes(
    copies: Sequence[PlacedCopy], sizes: Mapping[int, int], staying: Sequence[NodeId], backups: int
) -> int:
    """The least that any balanced placement moves, by trying all of them."""
    live = {(c.partition, c.node) for c in copies if c.state == "live"}

    def balanced() -> Iterator[int]:
        choices = list(itertools.combinations(staying, backups + 1))
        for chosen in itertools.product(choices, repeat=len(sizes)):
            load = Counter(dict.fromkeys(staying, 0))
            load.update(itertools.chain.from_iterable(chosen))
            if max(load.values()) - min(load.values()) <= 1:
                pairs = ((p, node) for p, nodes in zip(sizes, chosen, strict=True) for node in nodes)
                yield sum(sizes[p] for p, node in pairs if (p, node) not in live)

    return min(balanced())


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[list[PlacedCopy], dict[int, int], tuple[NodeId, ...], int, list[NodeId]]:
    nodes = NODES[: draw(st.integers(1, 4))]
    partitions = draw(st.integers(1, 4))
    sizes = {p: draw(st.integers(0, 5)) for p in range(partitions)}
    copies = []
    for p in range(partitions):
        holders = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
        copies += [PlacedCopy(p, node) for node in holders]
        absent = draw(st.lists(st.sampled_from(NODES[4:]), max_size=1))
        copies += [PlacedCopy(p, node, "lost") for node in absent]
    leaving = draw(st.lists(st.sampled_from(nodes), max_size=len(nodes) - 1, unique=True))
    backups = draw(st.integers(0, min(2, len(nodes) - len(leaving) - 1)))
    return copies, sizes, nodes, backups, leaving


@settings(max_examples=150, deadline=None)
@given(situations())
def test_no_balanced_placement_moves_fewer_bytes(
    situation: tuple[list[PlacedCopy], dict[int, int], tuple[NodeId, ...], int, list[NodeId]],
):
    copies, sizes, nodes, backups, leaving = situation
    staying = [node for node in nodes if node not in leaving]
    plan = plan_rebalancing(copies, sizes, nodes, backups, leaving)
    check(plan, copies, staying, backups)
    assert plan.bytes == fewest_bytes(copies, sizes, staying, backups)
    assert plan == plan_rebalancing(copies[::1], dict(reversed(sizes.items())), nodes[::-1], backups, leaving)
    again = plan_rebalancing(placed(plan.owners), sizes, staying, backups)
    assert not again.moves and not again.drops


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_what_an_import_made_stays(backups: int):
    copies = imported(24, 4, backups)
    plan = plan_rebalancing(copies, dict.fromkeys(range(24), 10), NODES[:4], backups)
    assert not plan.moves and not plan.drops
    assert placed(plan.owners) == copies


@pytest.mark.parametrize("backups", [0, 1])
def test_a_node_that_joins_gets_its_share_and_no_byte_more(backups: int):
    partitions = 20
    plan = plan_rebalancing(
        imported(partitions, 4, backups), dict.fromkeys(range(partitions), 7), NODES[:5], backups
    )
    assert {move.target for move in plan.moves} == {NODES[4]}
    assert plan.bytes == 7 * partitions * (backups + 1) // 5


def test_a_node_that_joins_becomes_primary_where_numbers_do_not_divide():
    """Else jobs, which place a worker at each primary owner, would leave it idle."""
    plan = plan_rebalancing(imported(9, 3, 1), dict.fromkeys(range(9), 7), NODES[:4], 1)
    assert sorted(Counter(nodes[0] for nodes in plan.owners.values()).values()) == [2, 2, 2, 3]
    kept = [p for p, nodes in plan.owners.items() if nodes[0] == imported(9, 3, 1)[2 * p].node]
    assert len(kept) == 7 and sorted(plan.promoted) == sorted(set(range(9)) - set(kept))


def test_numbers_of_primaries_are_equal_along_chains_of_changes():
    """node-2 holds nothing of node-0, but what node-1 gives up for it."""
    a, b, c = NODES[:3]
    copies = placed({0: (a, b), 1: (a, b), 2: (a, b), 3: (b, c)})
    plan = plan_rebalancing(copies, dict.fromkeys(range(4), 1), NODES[:3], 1)
    assert max(Counter(nodes[0] for nodes in plan.owners.values()).values()) == 2


def test_a_node_that_leaves_gives_away_what_it_has_alone():
    copies = imported(12, 4)
    plan = plan_rebalancing(copies, dict.fromkeys(range(12), 1), NODES[:4], 0, leaving=[NODES[1]])
    assert {(m.source, m.replaced) for m in plan.moves} == {(NODES[1], NODES[1])} and len(plan.moves) == 3


def test_backups_of_a_lost_node_are_made_again_from_those_that_live():
    copies = [
        PlacedCopy(c.partition, c.node, "lost" if c.node == NODES[0] else "live") for c in imported(12, 4, 1)
    ]
    plan = plan_rebalancing(copies, dict.fromkeys(range(12), 1), NODES[1:4], 1)
    lost = {c.partition for c in copies if c.state == "lost"}
    assert {m.partition for m in plan.moves} == lost and all(m.replaced == NODES[0] for m in plan.moves)
    assert Counter(nodes[0] for nodes in plan.owners.values()) == dict.fromkeys(NODES[1:4], 4)


def test_what_no_node_has_is_named():
    copies = [PlacedCopy(0, NODES[0]), PlacedCopy(1, NODES[1], "lost"), PlacedCopy(2, NODES[0], "copying")]
    plan = plan_rebalancing(copies, {0: 1, 1: 1, 2: 1}, NODES[:1], 0)
    assert plan.unavailable == (1, 2) and plan.owners == {0: (NODES[0],)}


def test_fewer_backups_drop_copies_without_moving_any():
    plan = plan_rebalancing(imported(12, 3, 2), dict.fromkeys(range(12), 1), NODES[:3], 0)
    assert not plan.moves and len(plan.drops) == 24


def test_more_copies_than_nodes_are_refused():
    with pytest.raises(InputError, match=r"more nodes that stay than backups. Received: 1 node for 1 "):
        plan_rebalancing(imported(2, 2), {0: 1, 1: 1}, NODES[:2], 1, leaving=[NODES[0]])


def test_lost_copies_are_replaced_before_those_that_live():
    copies = [PlacedCopy(0, NODES[0]), PlacedCopy(0, NODES[1], "lost"), PlacedCopy(0, NODES[2], "copying")]
    assert _removed(copies, 0, (NODES[3],)) == [NODES[1], NODES[0]]
