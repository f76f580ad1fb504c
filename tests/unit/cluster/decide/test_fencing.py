from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.cluster.decide import (
    AgentView,
    Claim,
    choose_next_epoch,
    find_missing_majority,
    find_obstacle_to_taking_over,
    may_obey,
)
from insitu.spec import NodeId

NODES = [NodeId(name) for name in "abcde"]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xyz")), max_size=20))
def test_who_obeys_never_goes_back_and_never_obeys_two_of_one_number(asked: list[tuple[int, str]]) -> None:
    """In any order of claims, repeated or late."""
    seen: Claim | None = None
    obeyed: dict[int, str] = {}
    for number, instance in asked:
        claim = Claim(number, instance)
        if may_obey(seen, claim):
            assert seen is None or number >= seen.number
            assert obeyed.setdefault(number, instance) == instance
            seen = claim
        else:
            assert seen is not None and claim != seen and number <= seen.number


class Candidate:
    """A machine on which somebody wants the head to be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.claim: Claim | None = None
        self.obeying: set[NodeId] = set()
        self.led = False
        """Whether it has started its head."""


@settings(max_examples=300)
@given(st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_of_several_that_take_over_at_the_same_time_one_has_most_agents(
    count: int, seed: int, old_head_starts_again: bool
) -> None:
    """Each asks and orders in any mixture with the others. Of an epoch there is one head at
    most, and most agents obey one. No agent leaves what it has obeyed for less."""
    chance = random.Random(seed)
    nodes = NODES[:count]
    seen = {node: Claim(3, "old") for node in nodes}
    candidates = [Candidate(name) for name in "pqr"]
    for _ in range(40):
        each = chance.choice(candidates)
        if each.claim is None:
            views = {n: AgentView(seen[n].number, False) for n in nodes if chance.random() < 0.8}
            if not find_obstacle_to_taking_over(nodes, views):
                each.claim = Claim(choose_next_epoch(max(v.epoch for v in views.values())), each.name)
            continue
        node = chance.choice(nodes)
        if may_obey(seen[node], each.claim):
            assert each.claim.number >= seen[node].number
            seen[node] = each.claim
            each.obeying.add(node)
        each.led |= not find_missing_majority(nodes, each.obeying)
        if old_head_starts_again:
            old = Claim(chance.randrange(4, 1000), "old")  # each start takes the next epoch
            assert not may_obey(seen[node], old) or seen[node].instance == "old"
    epochs = [c.claim.number for c in candidates if c.led and c.claim is not None]
    assert len(epochs) == len(set(epochs))
    followed = [c for c in candidates if sum(seen[n] == c.claim for n in nodes) * 2 > len(nodes)]
    assert len(followed) <= 1


def test_nobody_takes_over_from_a_head_that_leads_an_agent() -> None:
    views = {node: AgentView(3, node == "b") for node in NODES[:3]}
    assert find_obstacle_to_taking_over(NODES[:3], views).startswith("b is led by the head, which lives")


def test_most_agents_must_be_there() -> None:
    nodes = NODES[:4]
    assert "2 of 4 agents; c, d can't be reached" in find_missing_majority(nodes, nodes[:2])
    assert find_missing_majority(nodes, nodes[:3]) == ""
    # Who isn't known doesn't count.
    assert find_missing_majority(nodes, [*nodes[:2], NodeId("x")]) != ""


def test_an_epoch_of_the_next_term_is_above_all_starts_of_the_head_before() -> None:
    assert choose_next_epoch(0) > 100_000
    assert choose_next_epoch(choose_next_epoch(7) + 5) > choose_next_epoch(7) + 100_000
