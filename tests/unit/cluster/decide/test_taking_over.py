from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.cluster.decide import AgentView, membership, taking_over
from insitu.cluster.decide.taking_over import (
    LEAST_SECONDS,
    MOST_ATTEMPTS,
    PAUSE_SECONDS,
    STAGGER_SECONDS,
    Vacancy,
    find_head,
    find_last_majority,
    is_due,
    judge,
    lose_head,
    note_failure,
    note_verdict,
    set_time,
)
from insitu.spec import NodeId

AFTER = 30.0
NODES = [NodeId(name) for name in "abcde"]


class Node:
    """One node of a simulated cluster. Its clock is the common one, and begins anywhere."""

    def __init__(self, name: NodeId, offset: float) -> None:
        self.name = name
        self.offset = offset
        self.vacancy = Vacancy(AFTER)
        self.attempts: list[float] = []


class Cluster:
    """Nodes in groups that don't reach each other, and a head that leads those of one group."""

    def __init__(self, count: int, chance: random.Random) -> None:
        self.chance = chance
        self.nodes = {name: Node(name, chance.uniform(0, 1e6)) for name in NODES[:count]}
        self.group = dict.fromkeys(self.nodes, 0)
        #: The group that the head is in, and who obeys it; None: it is lost.
        self.head: int | None = 0
        self.heads: list[tuple[float, NodeId, list[NodeId]]] = []
        self.now = 0.0

    def split(self) -> None:
        self.group = {name: self.chance.randrange(2) for name in self.nodes}

    def is_led(self, name: NodeId) -> bool:
        return self.head == self.group[name]

    def step(self, fails: bool = False) -> None:
        """Let a moment pass, in which each node does what it decides."""
        self.now += self.chance.uniform(0.1, 2.0)
        names = list(self.nodes)
        self.chance.shuffle(names)
        for name in names:
            self._advance(self.nodes[name], fails)

    def _advance(self, node: Node, fails: bool) -> None:
        now = self.now + node.offset
        if self.is_led(node.name):
            node.vacancy = find_head(node.vacancy)
            return
        if node.vacancy.lost_at is None:
            node.vacancy = lose_head(node.vacancy, now)
        if not is_due(node.vacancy, now):
            return
        assert node.vacancy.lost_at is not None
        views = {
            name: AgentView(1, self.is_led(name), self._without_head(self.nodes[name]))
            for name in self.nodes
            if self.group[name] == self.group[node.name]
        }
        overdue = now - node.vacancy.lost_at - AFTER
        verdict = judge(list(self.nodes), views, node.name, AFTER, overdue)
        if verdict.obstacle or verdict.wait:
            node.vacancy = note_verdict(node.vacancy, verdict, now)
            return
        node.attempts.append(self.now)
        assert 2 * len(views) > len(self.nodes), "a minority has tried"
        assert self.head not in {self.group[name] for name in views}, "a head that lives was ignored"
        if fails:
            node.vacancy = note_failure(node.vacancy, now)
            return
        self.heads.append((self.now, node.name, sorted(views)))
        self.head = self.group[node.name]

    def _without_head(self, node: Node) -> float:
        lost_at = node.vacancy.lost_at
        return 0.0 if lost_at is None or self.is_led(node.name) else self.now + node.offset - lost_at


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(0, 2**32))
def test_a_majority_without_a_head_gets_one_and_a_minority_never_takes_over(count: int, seed: int) -> None:
    """Through any cuts. `Cluster` asserts what must hold at each attempt."""
    cluster = Cluster(count, random.Random(seed))
    for _ in range(cluster.chance.randrange(6)):
        cluster.split()
        if cluster.chance.random() < 0.3:
            cluster.head = None
        for _ in range(cluster.chance.randrange(60)):
            cluster.step()
    cluster.group = dict.fromkeys(cluster.nodes, 7)
    cluster.head = None
    since, before = cluster.now, len(cluster.heads)
    while len(cluster.heads) == before:
        cluster.step()
        assert cluster.now - since < AFTER + count * STAGGER_SECONDS + 2 * PAUSE_SECONDS[1] + 10
    # The one that has taken over is the first by name of those that had been without a head for so long.
    _, taken, _ = cluster.heads[-1]
    assert cluster.is_led(taken)


def test_nodes_try_in_the_order_of_their_names() -> None:
    views = {name: AgentView(1, False, AFTER + 1) for name in NODES[1:4]}
    waits = [judge(NODES, views, name, AFTER, 1.0).wait for name in NODES[1:4]]
    assert waits == [0.0, STAGGER_SECONDS - 1, 2 * STAGGER_SECONDS - 1]  # a is away, and isn't waited for
    assert judge(NODES, views, NODES[3], AFTER, 2 * STAGGER_SECONDS) == taking_over.Verdict()


@pytest.mark.parametrize(
    ("views", "why"),
    [
        ({"a": (False, 40.0), "b": (False, 40.0)}, "2 of 5 agents"),
        ({"a": (False, 40.0), "b": (True, 0.0), "c": (False, 40.0)}, "b is led by the head, which lives"),
        ({"a": (False, 40.0), "b": (False, 40.0), "c": (False, 29.0)}, "without a head for 30 s"),
    ],
)
def test_why_a_node_does_not_take_over(views: dict[str, tuple[bool, float]], why: str) -> None:
    seen = {NodeId(name): AgentView(1, *view) for name, view in views.items()}
    assert why in judge(NODES, seen, NODES[0], AFTER, 10.0).obstacle


def test_a_node_that_was_led_meanwhile_leaves_it_to_others() -> None:
    views = {name: AgentView(1, False, 40.0) for name in NODES[1:4]} | {NODES[0]: AgentView(1, False, 3.0)}
    assert "a has had a head within the last 30 s" in judge(NODES, views, NODES[0], AFTER, 0.0).obstacle


@given(st.lists(st.booleans(), max_size=40))
def test_pauses_grow_to_a_bound_and_attempts_that_fail_are_few(failing: list[bool]) -> None:
    vacancy, now = lose_head(Vacancy(AFTER), 0.0), AFTER
    pauses = []
    for fails in failing:
        if not is_due(vacancy, now):
            assert vacancy.attempts == MOST_ATTEMPTS
            break
        after = note_failure if fails else lambda v, at: note_verdict(v, taking_over.Verdict("why"), at)
        vacancy = after(vacancy, now)
        pauses.append(vacancy.look_at - now)
        assert not is_due(vacancy, now)
        now = vacancy.look_at
    assert vacancy.attempts <= MOST_ATTEMPTS
    assert pauses == sorted(pauses) and all(PAUSE_SECONDS[0] <= p <= PAUSE_SECONDS[1] for p in pauses)
    assert find_head(vacancy) == Vacancy(AFTER)


def test_the_pause_doubles_up_to_the_longest() -> None:
    vacancy, pauses = lose_head(Vacancy(AFTER), 0.0), []
    for _ in range(6):
        vacancy = note_verdict(vacancy, taking_over.Verdict("why"), 0.0)
        pauses.append(vacancy.look_at)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_promise_to_another_one_gives_it_time_and_keeps_the_count_of_attempts() -> None:
    vacancy = note_failure(lose_head(Vacancy(AFTER), 0.0), AFTER)
    again = lose_head(vacancy, 50.0)
    assert (again.look_at, again.attempts, again.failures) == (50.0 + AFTER, 1, 0)


def test_nothing_is_tried_where_that_is_off_or_there_is_a_head() -> None:
    assert not is_due(lose_head(Vacancy(None), 0.0), 1e9)
    assert not is_due(Vacancy(AFTER), 1e9)
    later = set_time(lose_head(Vacancy(None), 5.0), 40.0)
    assert not is_due(later, 44.9) and is_due(later, 45.0)
    assert not is_due(set_time(later, None), 1e9)
    assert LEAST_SECONDS >= 2 * membership.LOST_SECONDS


@given(st.lists(st.floats(0, 100), max_size=6), st.integers(0, 6))
def test_the_last_majority_is_the_latest_time_since_which_most_were_heard(
    heard: list[float], silent: int
) -> None:
    known = len(heard) + silent
    found = find_last_majority(known, heard)
    if found is None:
        assert 2 * len(heard) <= known
    else:
        assert 2 * sum(at >= found for at in heard) > known
        assert 2 * sum(at > found for at in heard) <= known
