"""Who belongs to the cluster: joining, silence, loss, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from agent_facts import LOAD, VERSIONS, WALL, facts
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.spec import NodeId
from insitu.cluster.decide import Membership
from insitu.cluster.decide.membership import (
    LOST_SECONDS,
    MAX_CLOCK_SKEW,
    SILENT_SECONDS,
    Admit,
    Changed,
    Checked,
    Close,
    Draining,
    DrainingCancelled,
    Ended,
    Heard,
    Joining,
    Probe,
    Refuse,
    Tick,
    decide,
    describe_state,
    find_differences,
    find_obstacle_to_draining,
    resume_membership,
    validate_membership,
)

EMPTY = Membership(VERSIONS)


def after(*events: tuple[float, Any], membership: Membership = EMPTY) -> tuple[Membership, tuple[Any, ...]]:
    """The membership after (time, event)s, and the actions of the last."""
    actions: tuple[Any, ...] = ()
    for now, event in events:
        membership, actions = decide(membership, event, now, WALL + now)
        validate_membership(membership)
    return membership, actions


def states(membership: Membership) -> dict[str, str]:
    return {str(node): member.state for node, member in membership.members.items()}


def test_an_agent_joins_and_is_lost_after_its_silence() -> None:
    joined, actions = after((0, Joining(1, facts(), LOAD)))
    assert actions == (Admit(1, NodeId("a")), Changed()) and states(joined) == {"a": "alive"}
    heard, actions = after((4, Heard(1, replace(LOAD, disk_free=9))), membership=joined)
    assert actions == () and heard.members[NodeId("a")].load.disk_free == 9
    silent, actions = after((4 + SILENT_SECONDS + 0.1, Tick()), membership=heard)
    assert states(silent) == {"a": "silent"} and actions == (Changed(),)
    lost, actions = after((4 + LOST_SECONDS + 0.1, Tick()), membership=silent)
    assert states(lost) == {"a": "lost"} and actions == (Close(1), Changed())
    assert after((99, Tick()), membership=lost)[1] == ()


def test_a_silent_agent_that_speaks_is_alive_again() -> None:
    membership, actions = after((0, Joining(1, facts(), LOAD)), (6, Tick()), (7, Heard(1, LOAD)))
    assert states(membership) == {"a": "alive"} and actions == (Changed(),)
    assert membership.members[NodeId("a")].since == WALL + 7


def test_a_node_that_is_to_leave_is_drained_or_kept() -> None:
    node = NodeId("a")
    joined = after((0, Joining(1, facts("a"), LOAD)), (0, Joining(2, facts("b"), LOAD)))[0]
    draining, actions = after((1, Draining(node, 60.0)), membership=joined)
    assert draining.leaving == (node,) and actions == (Changed(),)
    assert describe_state(draining.members[node]) == "draining"
    assert after((2, Draining(node, 90.0)), membership=draining)[1] == (), "the earlier time counts"
    assert after((2, Draining(node, 9.0)), membership=draining)[0].members[node].leave_by == WALL + 11
    drained, _ = after((3, Checked(node, True)), membership=draining)
    assert describe_state(drained.members[node]) == "drained"
    assert after((3, Checked(NodeId("b"), True)), membership=joined) == (joined, ())
    again = facts("a", process="another")
    back = after((4, Ended(1)), (5, Joining(3, again, LOAD)), membership=drained)[0]
    assert back.leaving == (node,) and describe_state(back.members[node]) == "draining"
    kept, actions = after((6, DrainingCancelled(node)), membership=drained)
    assert kept.leaving == () and actions == (Changed(),) and kept.members[node].state == "alive"


def test_a_lost_node_that_is_to_leave_has_left_once_it_is_empty() -> None:
    node = NodeId("a")
    joined = after((0, Joining(1, facts("a"), LOAD)), (0, Joining(2, facts("b"), LOAD)))[0]
    lost = after((1, Ended(1)), membership=joined)[0]
    assert after((2, Checked(node, True)), membership=lost) == (lost, ()), "nobody has given it up"
    leaving = after((2, Draining(node, 60.0)), (3, Checked(node, False)), membership=lost)[0]
    assert states(leaving) == {"a": "lost", "b": "alive"}
    left, actions = after((4, Checked(node, True)), membership=leaving)
    assert states(left) == {"a": "left", "b": "alive"} and actions == (Changed(),)
    assert left.members[node].since == WALL + 4 and left.members[node].is_empty
    back = after((5, Joining(3, facts("a", process="another"), LOAD)), membership=left)[0]
    assert describe_state(back.members[node]) == "draining"


def test_the_last_node_that_stays_and_strangers_cannot_leave() -> None:
    joined = after((0, Joining(1, facts("a"), LOAD)), (0, Joining(2, facts("b"), LOAD)))[0]
    assert find_obstacle_to_draining(joined, NodeId("a")) == ""
    assert "its nodes are a, b" in find_obstacle_to_draining(joined, NodeId("c"))
    draining = after((1, Draining(NodeId("b"), 60.0)), membership=joined)[0]
    assert "so one must stay" in find_obstacle_to_draining(draining, NodeId("a"))
    assert find_obstacle_to_draining(draining, NodeId("b"), cancel=True) == ""
    lost = after((1, Ended(2)), membership=joined)[0]
    assert "so one must stay" in find_obstacle_to_draining(lost, NodeId("a"))


@pytest.mark.parametrize(("leaving", "state"), [(False, "lost"), (True, "left")])
def test_the_end_of_a_connection_is_known_at_once(leaving: bool, state: str) -> None:
    membership, actions = after((0, Joining(1, facts(), LOAD)), (1, Ended(1, leaving)))
    assert states(membership) == {"a": state} and actions == (Changed(),)


def test_a_lost_agent_comes_back_as_the_same_node() -> None:
    membership, actions = after(
        (0, Joining(1, facts(), LOAD)), (1, Ended(1)), (2, Joining(2, facts(process="q"), LOAD))
    )
    assert states(membership) == {"a": "alive"} and actions == (Admit(2, NodeId("a")), Changed())


def test_an_agent_that_dials_again_before_its_loss_is_known_replaces_its_connection() -> None:
    membership, actions = after((0, Joining(1, facts(), LOAD)), (1, Joining(2, facts(), LOAD)))
    assert actions == (Close(1), Admit(2, NodeId("a")), Changed())
    assert after((2, Ended(1)), membership=membership)[0] == membership


@pytest.mark.parametrize(
    ("rival", "reason"),
    [
        (facts("b", "store-of-a", "q"), r"Each store has one agent\. Received: store store-of-a from host-b"),
        (facts("a", "other", "q"), r"Each node has a name of its own\. Received: a from host-a .*--name"),
    ],
)
def test_two_agents_that_live_cannot_be_one(rival: Any, reason: str) -> None:
    """The former one may be dead already: the head looks, and the other one tries again."""
    joined = after((0, Joining(1, facts(), LOAD)))[0]
    membership, (refusal, probe) = after((1, Joining(2, rival, LOAD)), membership=joined)
    assert membership == joined and probe == Probe(1)
    assert isinstance(refusal, Refuse) and refusal.again
    assert re.search(reason, refusal.reason)
    # One that has spoken since then is alive, and there is nothing to wait for.
    spoken = after((2, Heard(1, LOAD)), membership=joined)[0]
    (refusal, _) = after((3, Joining(2, rival, LOAD, waited=2)), membership=spoken)[1]
    assert isinstance(refusal, Refuse) and not refusal.again
    # Once the former one is known to be dead, nothing is in the way.
    assert states(after((1, Ended(1)), (2, Joining(2, rival, LOAD)), membership=joined)[0]) in (
        {"b": "alive"},
        {"a": "alive"},
    )


def test_a_store_under_another_name_says_what_it_was() -> None:
    membership, actions = after(
        (0, Joining(1, facts("a"), LOAD)), (1, Ended(1)), (2, Joining(2, facts("b", "store-of-a"), LOAD))
    )
    assert actions[0] == Admit(2, NodeId("b"), NodeId("a")) and states(membership) == {"b": "alive"}


def refusal_of(made: Any, membership: Membership = EMPTY) -> str:
    unchanged, (refusal,) = after((0, Joining(1, made, LOAD)), membership=membership)
    assert unchanged == membership and isinstance(refusal, Refuse) and not refusal.again
    return refusal.reason


def test_other_versions_are_refused_and_named() -> None:
    reason = refusal_of(facts(versions={**VERSIONS, "python": "3.12", "keras": "3.12.0"}))
    assert "host-a has keras 3.12.0 instead of 3.11.3, python 3.12 instead of 3.11" in reason
    assert "insitu none instead of 1.0" in refusal_of(facts(versions={"python": "3.11"}))


def test_a_backend_that_only_nodes_have_must_be_the_same_on_all() -> None:
    """The head may be a machine without one."""
    first = after((0, Joining(1, facts("a", versions={**VERSIONS, "jax": "0.9"}), LOAD)))[0]
    made = facts("b", versions={**VERSIONS, "jax": "0.8"})
    assert "jax 0.8 instead of 0.9" in refusal_of(made, replace(first))
    assert after((1, Joining(2, facts("b"), LOAD)), membership=first)[1][0] == Admit(2, NodeId("b"))


@pytest.mark.parametrize("skew", [3600.0, -3600.0])
def test_a_clock_that_is_an_hour_off_is_refused(skew: float) -> None:
    side = "ahead of" if skew > 0 else "behind"
    assert f"host-a, which is 3600 s {side} the head" in refusal_of(facts(clock=WALL + skew))
    assert after((0, Joining(1, facts(clock=WALL + MAX_CLOCK_SKEW - 1), LOAD)))[1][0] == Admit(1, NodeId("a"))


def test_why_a_lost_member_is_not_let_in_is_noted_until_it_is() -> None:
    """It was shown as lost, without a reason."""
    lost = after((0, Joining(1, facts(), LOAD)), (1, Ended(1)))[0]
    refused, actions = after((2, Joining(2, facts(clock=WALL + 3600.0), LOAD)), membership=lost)
    (member,) = refused.members.values()
    assert member.state == "lost" and "3598 s ahead of the head" in member.refused
    assert isinstance(actions[0], Refuse) and actions[1] == Changed()
    (member,) = after((3, Joining(3, facts(), LOAD)), membership=refused)[0].members.values()
    assert member.state == "alive" and not member.refused
    # What a stranger or a copy of the store hears isn't about the member.
    stranger = after((2, Joining(2, facts(store="other", clock=WALL + 3600.0), LOAD)), membership=lost)[0]
    assert [m.refused for m in stranger.members.values()] == [""]


def test_the_name_of_a_store_of_the_head_is_taken() -> None:
    membership = replace(EMPTY, local_stores={NodeId("a"): "local"})
    assert "the name of a store in the home of the head" in refusal_of(facts("a"), membership)
    # The agent of that store may have it.
    assert states(after((0, Joining(1, facts("a", "local"), LOAD)), membership=membership)[0]) == {
        "a": "alive"
    }


def test_a_new_head_gives_the_agents_of_the_former_one_time_to_come_back() -> None:
    before = after((0, Joining(1, facts("a"), LOAD)), (0, Joining(2, facts("b"), LOAD)), (1, Ended(2, True)))
    resumed = resume_membership(before[0], now=5.0)
    validate_membership(resumed)
    assert states(resumed) == {"a": "silent", "b": "left"}
    assert states(after((6, Tick()), membership=resumed)[0]) == {"a": "silent", "b": "left"}
    assert states(after((5 + LOST_SECONDS + 0.1, Tick()), membership=resumed)[0])["a"] == "lost"
    # An agent that was started again meanwhile isn't held up by the former one's entry.
    assert (
        states(after((6, Joining(1, facts("a", process="q"), LOAD)), membership=resumed)[0])["a"] == "alive"
    )


def test_versions_are_compared_where_both_have_them() -> None:
    assert find_differences(VERSIONS, {**VERSIONS, "torch": "2.13"}) == []
    assert find_differences({**VERSIONS, "torch": "2.12"}, VERSIONS) == []


CONNECTIONS = st.integers(1, 4)
EVENTS = st.one_of(
    st.builds(
        Joining,
        CONNECTIONS,
        st.builds(
            facts, st.sampled_from("ab"), st.sampled_from(["s", "t", "u"]), st.sampled_from(["p", "q"])
        ),
        st.just(LOAD),
        st.floats(0, 5),
    ),
    st.builds(Heard, CONNECTIONS, st.just(LOAD)),
    st.builds(Ended, CONNECTIONS, st.booleans()),
    st.just(Tick()),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), EVENTS), max_size=30))
def test_whatever_happens_the_membership_can_be(history: list[tuple[float, Any]]) -> None:
    """No two members have one store or connection; who is refused changes nothing; who is admitted is in."""
    membership, now = EMPTY, 0.0
    for seconds, event in history:
        now += seconds
        before = membership
        membership, actions = decide(membership, event, now, WALL)
        validate_membership(membership)
        for action in actions:
            if isinstance(action, Admit):
                assert membership.members[action.node].connection == action.connection
            if isinstance(action, Refuse):
                assert membership == before
            if isinstance(action, Close):
                assert membership.find(action.connection) is None
