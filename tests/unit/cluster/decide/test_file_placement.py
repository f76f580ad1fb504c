"""Which nodes hold what, and what a repair does about copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.cluster.decide import choose_holders, count_name_copies, may_write, plan_repair, rank_nodes
from insitu.spec import NodeId

NODES = [NodeId(f"node-{i}") for i in range(7)]
nodes = st.lists(st.sampled_from(NODES), min_size=1, unique=True)


@given(key=st.text(max_size=10), alive=nodes)
def test_the_order_doesnt_depend_on_who_asks_or_who_is_lost(key: str, alive: list[NodeId]) -> None:
    order = rank_nodes(key, reversed(alive))
    assert order == rank_nodes(key, alive)
    assert order == [node for node in rank_nodes(key, NODES) if node in alive]


def test_keys_are_spread_over_nodes() -> None:
    firsts = [rank_nodes(str(number), NODES)[0] for number in range(700)]
    assert all(50 < firsts.count(node) < 150 for node in NODES)


def test_holders_and_names() -> None:
    assert choose_holders("x", NODES, 3) == rank_nodes("x", NODES)[:3]
    assert choose_holders("x", NODES[:2], 3) == rank_nodes("x", NODES[:2])
    assert (count_name_copies(1), count_name_copies(5)) == (3, 5)


@pytest.mark.parametrize(
    ("reachable", "known", "is_led", "may"),
    [
        (1, 3, True, False),
        (2, 4, True, True),
        (1, 2, True, True),
        (2, 4, False, False),
        (2, 3, False, True),
        (1, 3, False, False),
        (1, 2, False, False),
        (1, 1, False, True),
    ],
)
def test_one_part_of_a_cluster_that_was_cut_may_write(
    reachable: int, known: int, is_led: bool, may: bool
) -> None:
    assert may_write(reachable, known, is_led=is_led) is may


@given(known=st.integers(1, 9), data=st.data())
def test_two_parts_never_both_write(known: int, data: st.DataObject) -> None:
    one = data.draw(st.integers(0, known))
    assert not (may_write(one, known, is_led=True) and may_write(known - one, known, is_led=False))
    # Another head needs the promises of most nodes. It and the first one never both have half of them.
    if 2 * (known - one) > known:
        assert not may_write(one, known, is_led=True)


@given(
    alive=nodes,
    wanted=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4)),
    held=st.dictionaries(st.sampled_from(NODES), st.sets(st.sampled_from("abcdefg"))),
)
def test_a_repair_leaves_the_number_of_copies_that_is_asked_for(
    alive: list[NodeId], wanted: dict[str, int], held: dict[NodeId, set[str]]
) -> None:
    plan = plan_repair(wanted, held, alive)
    after = {node: set(held.get(node, ())) for node in alive}
    for key, sources, targets in plan.copies:
        assert sources and all(key in after[node] for node in sources)
        for node in targets:
            assert key not in after[node]
            after[node].add(key)
    for key, node in plan.surplus:
        after[node].remove(key)
    for key, count in wanted.items():
        copies = sum(key in keys for keys in after.values())
        assert copies == (0 if key in plan.lost else min(count, len(alive)))
    again = plan_repair(wanted, after, alive)
    assert not again.copies and not again.surplus and again.lost == plan.lost
