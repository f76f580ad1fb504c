"""Which nodes of Ray get a holder: joining, leaving, coming back, other settings, starts that fail."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.cluster.decide.holders import (
    RETRY_SECONDS,
    EndHolder,
    Failure,
    StartHolder,
    reconcile,
    record_failure,
)


def test_each_node_that_is_alive_gets_one_holder() -> None:
    assert reconcile({"a", "b"}, {}, "s", {}, 0) == (StartHolder("a"), StartHolder("b"))
    assert reconcile({"a", "b"}, {"a": "s", "b": None}, "s", {}, 0) == ()


def test_a_holder_of_a_dead_node_ends() -> None:
    assert reconcile({"a"}, {"a": "s", "b": "s", "c": None}, "s", {}, 0) == (EndHolder("b"), EndHolder("c"))


def test_a_holder_with_other_settings_is_replaced_once_it_has_ended() -> None:
    assert reconcile({"a"}, {"a": "old"}, "new", {}, 0) == (EndHolder("a"),)
    assert reconcile({"a"}, {}, "new", {}, 0) == (StartHolder("a"),)


def test_a_start_that_failed_waits_longer_each_time() -> None:
    first, longest = RETRY_SECONDS
    failed = record_failure(None, 10)
    assert failed == Failure(1, 10 + first)
    assert reconcile({"a"}, {}, "s", {"a": failed}, 10 + first - 0.1) == ()
    assert reconcile({"a"}, {}, "s", {"a": failed}, 10 + first) == (StartHolder("a"),)
    assert record_failure(failed, 20) == Failure(2, 20 + 2 * first)
    assert record_failure(Failure(10**6, 0), 0).retry_at == longest


@dataclass
class FakeRay:
    """What Ray does with the actions: a holder that is asked to end takes a while."""

    alive: set[str] = field(default_factory=set)
    holders: dict[str, str | None] = field(default_factory=dict)
    #: Holders with the right settings on living nodes that were ended.
    wronged: list[str] = field(default_factory=list)

    def act(self, wanted: str) -> int:
        actions = reconcile(self.alive, self.holders, wanted, {}, 0)
        for action in actions:
            match action:
                case StartHolder(node):
                    assert node not in self.holders and node in self.alive
                    self.holders[node] = wanted
                case EndHolder(node):
                    if self.holders.pop(node) == wanted and node in self.alive:
                        self.wronged.append(node)
        return len(actions)


EVENTS = st.tuples(st.sampled_from(["join", "leave", "die", "settings", "pass"]), st.sampled_from("abcd"))


@given(st.lists(EVENTS, max_size=40))
@settings(deadline=None)
def test_whatever_happens_two_passes_lead_to_what_should_be(events: list[tuple[str, str]]) -> None:
    ray, wanted = FakeRay(), "s0"
    for number, (event, node) in enumerate(events):
        match event:
            case "join":
                ray.alive.add(node)
            case "leave":
                ray.alive.discard(node)
            case "die":
                ray.holders.pop(node, None)
            case "settings":
                wanted = f"s{number}"
            case "pass":
                ray.act(wanted)
    ray.act(wanted)
    ray.act(wanted)
    assert ray.act(wanted) == 0
    assert ray.holders == dict.fromkeys(ray.alive, wanted) and not ray.wronged
