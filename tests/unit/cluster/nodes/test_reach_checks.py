from __future__ import annotations

from insitu.base.spec import NodeId
from insitu.cluster.nodes.head import ReachChecks
from insitu.cluster.wire.options import CHECK_SECONDS

A, B = NodeId("a"), NodeId("b")


def test_a_question_is_answered_once_all_have_and_names_who_is_late() -> None:
    checks = ReachChecks()
    checks.begin(5, 9, {1: A, 2: B}, now=0.0)
    checks.begin(6, 8, {1: A}, now=0.0)
    checks.note(5, 1, {"b": "refused"})
    checks.note(5, 7, {"b": "not asked"})
    checks.note("6", 1, {})
    assert checks.take_answers({1, 2}, 1.0) == []
    late = CHECK_SECONDS + 1.0
    first, second = checks.take_answers({1, 2}, late)
    assert first == (9, {"do": "check", "pairs": [("a", "b", "refused")], "silent": ["b"]})
    assert second == (8, {"do": "check", "pairs": [], "silent": ["a"]})
    assert checks.take_answers({1, 2}, late) == []


def test_agents_that_have_gone_are_not_waited_for() -> None:
    checks = ReachChecks()
    checks.begin(5, 9, {1: A, 2: B}, now=0.0)
    checks.note(5, 1, {})
    assert checks.take_answers({1}, 0.0) == [(9, {"do": "check", "pairs": [], "silent": []})]
