from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.cluster.decide import (
    AgentView,
    Claim,
    choose_next_epoch,
    find_cluster_number,
    find_obstacle_to_replacing,
    is_replaced,
    may_accept,
)

VIEW = AgentView("c" * 32, "h:1", 3, head_answers=False)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xyz")), max_size=20))
def test_who_follows_never_goes_back_and_never_accepts_two_of_one_number(
    asked: list[tuple[int, str]],
) -> None:
    """In any order of claims, repeated or late."""
    seen: Claim | None = None
    accepted: dict[int, str] = {}
    for number, instance in asked:
        claim = Claim(number, instance)
        if may_accept(seen, claim):
            assert seen is None or number >= seen.number
            assert accepted.setdefault(number, instance) == instance
            seen = claim
        else:
            assert seen is not None and claim != seen and number <= seen.number


@settings(max_examples=300)
@given(st.integers(1, 5), st.integers(0, 2**32))
def test_agents_that_meet_agree_on_the_head_that_was_made_last(count: int, seed: int) -> None:
    """Heads start again, and are replaced from what some agents have accepted; agents meet. No head that was
    replaced is accepted by an agent that knows so, however often it starts again."""
    chance = random.Random(seed)
    seen = [Claim(3, "first") for _ in range(count)]
    heads = {"first": Claim(3, "first")}
    for step in range(40):
        agent = chance.randrange(count)
        match chance.choice(("replace", "start", "meet", "join")):
            case "replace":
                views = [replace(VIEW, epoch=claim.number) for claim in seen if chance.random() < 0.7]
                if views:
                    heads[f"head{step}"] = Claim(choose_next_epoch(views) + 1, f"head{step}")
            case "start":
                name = chance.choice(sorted(heads))
                heads[name] = Claim(heads[name].number + 1, f"{name}, {step}")
            case "meet":
                other = seen[chance.randrange(count)]
                if is_replaced(seen[agent], other):
                    seen[agent] = other
            case _:
                head = heads[chance.choice(sorted(heads))]
                if may_accept(seen[agent], head):
                    assert find_cluster_number(head.number) >= find_cluster_number(seen[agent].number)
                    seen[agent] = head
                elif is_replaced(head, seen[agent]):
                    # It is told so, and every agent with that number tells it the same.
                    assert not may_accept(seen[agent], replace(head, number=head.number + 1000))
    newest = max(seen, key=lambda claim: claim.number)
    for claim in seen:
        followed = newest if is_replaced(claim, newest) else claim
        assert find_cluster_number(followed.number) == find_cluster_number(newest.number)


def test_a_connected_agent_leaves_its_head_for_a_higher_number_of_the_cluster_alone() -> None:
    """A copy of the head's home starts in a higher epoch of the same number."""
    head = Claim(3, "a")
    assert may_accept(head, Claim(4, "b")) and not is_replaced(head, Claim(4, "b"))
    assert is_replaced(head, Claim(choose_next_epoch([VIEW]) + 1, "c"))
    assert not is_replaced(Claim(choose_next_epoch([VIEW]) + 1, "c"), Claim(1 << 19, "a"))


def test_the_next_number_is_above_all_starts_of_the_head_before() -> None:
    first = choose_next_epoch([VIEW, replace(VIEW, epoch=0)])
    assert (find_cluster_number(3), find_cluster_number(first), find_cluster_number(first + 1)) == (0, 1, 1)
    assert first > 100_000 and find_cluster_number(choose_next_epoch([replace(VIEW, epoch=first + 7)])) == 2


def test_a_head_is_replaced_that_answers_nobody_and_whose_agents_are_of_one_cluster() -> None:
    assert find_obstacle_to_replacing([VIEW, replace(VIEW, head="h:2")]) == ""
    assert find_obstacle_to_replacing([]).startswith("no host with an agent of that cluster")
    other = replace(VIEW, cluster="d" * 32)
    assert "agents of clusters cccccccc, dddddddd" in find_obstacle_to_replacing([VIEW, other])
    living = replace(VIEW, head="h:2", head_answers=True)
    assert "the head at h:2, which answers" in find_obstacle_to_replacing([VIEW, living])
