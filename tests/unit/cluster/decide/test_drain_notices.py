"""Which nodes are drained because Ray takes their machines away."""

from __future__ import annotations

from insitu.base.spec import NodeId
from insitu.cluster.decide.drain_notices import NO_DEADLINE_SECONDS, DrainNode, KeepNode, plan_drains

A, B = NodeId("a"), NodeId("b")
JOINED = {"ray-1": A, "ray-2": B}


def test_a_node_is_drained_once_and_again_only_for_an_earlier_deadline() -> None:
    assert plan_drains({}, JOINED, {}, 100.0) == ()
    assert plan_drains({"ray-2": 160.0}, JOINED, {}, 100.0) == (DrainNode(B, 160.0),)
    assert plan_drains({"ray-2": 160.0}, JOINED, {B: 160.0}, 110.0) == ()
    assert plan_drains({"ray-2": 190.0}, JOINED, {B: 160.0}, 110.0) == ()
    assert plan_drains({"ray-2": 130.0}, JOINED, {B: 160.0}, 110.0) == (DrainNode(B, 130.0),)


def test_without_a_deadline_there_is_some_time() -> None:
    found = plan_drains({"ray-1": None}, JOINED, {}, 100.0)
    assert found == (DrainNode(A, 100.0 + NO_DEADLINE_SECONDS),)
    assert plan_drains({"ray-1": None}, JOINED, {A: 100.0 + NO_DEADLINE_SECONDS}, 102.0) == ()


def test_a_node_without_an_agent_has_nothing_to_move() -> None:
    assert plan_drains({"ray-3": 160.0}, JOINED, {}, 100.0) == ()


def test_a_machine_that_comes_back_stays() -> None:
    # While it is away, nothing is known of it.
    assert plan_drains({}, {"ray-1": A}, {B: 160.0}, 200.0) == ()
    assert plan_drains({}, {"ray-1": A, "ray-9": B}, {B: 160.0}, 300.0) == (KeepNode(B),)
    # Ray may still list the id that it had before.
    assert plan_drains({"ray-2": 160.0}, {**JOINED, "ray-9": B}, {B: 160.0}, 300.0) == ()
