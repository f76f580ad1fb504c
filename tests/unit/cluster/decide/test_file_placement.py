"""Which nodes hold what, and what a repair does about copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import NodeId
from insitu.cluster.decide import plan_repair, rank_nodes

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
