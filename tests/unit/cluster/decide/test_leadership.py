from __future__ import annotations

import pytest

from insitu.cluster.decide import (
    HEAD_LEASE_SECONDS,
    Candidacy,
    Hold,
    Kept,
    Lost,
    SeenKey,
    Unanswered,
    advance_hold,
    choose_as_agent,
)


def test_a_head_may_lead_for_as_long_as_its_lease_lasts_from_when_it_asked() -> None:
    hold, action = advance_hold(Hold(0.0), Kept(5.0), 7.0)
    assert (hold, action) == (Hold(5.0), None)
    assert hold.may_lead(5.0 + HEAD_LEASE_SECONDS - 0.1) and not hold.may_lead(5.0 + HEAD_LEASE_SECONDS)


def test_a_head_whose_etcd_is_silent_says_so_once_when_its_lease_may_be_over() -> None:
    hold, action = advance_hold(Hold(0.0), Unanswered(), HEAD_LEASE_SECONDS - 0.1)
    assert action is None
    hold, action = advance_hold(hold, Unanswered(), HEAD_LEASE_SECONDS)
    assert action == "say_silent"
    hold, action = advance_hold(hold, Unanswered(), HEAD_LEASE_SECONDS + 1)
    assert action is None
    hold, action = advance_hold(hold, Kept(30.0), 31.0)
    assert (hold, action) == (Hold(30.0), "say_heard")


def test_a_head_stops_once_another_may_lead() -> None:
    assert advance_hold(Hold(0.0), Lost(), 1.0)[1] == "stop"


@pytest.mark.parametrize(
    ("key", "chosen"),
    [
        (None, "win"),
        (SeenKey(5, "h:1"), "follow"),
        (SeenKey(5, ""), "wait"),
        (SeenKey(5, "h:1", is_down=True), "wait"),
        (SeenKey(4, "h:1"), "wait"),
        (SeenKey(3, "h:1"), "wait"),
    ],
)
def test_an_agent_follows_a_higher_head_and_replaces_none_that_is_there(
    key: SeenKey | None, chosen: str
) -> None:
    assert choose_as_agent(Candidacy(4, True), key, 0.0) == chosen


def test_an_agent_leaves_it_to_others_if_it_cannot_lead_or_has_just_failed() -> None:
    assert choose_as_agent(Candidacy(4, False), None, 0.0) == "wait"
    failed = Candidacy(4, True).fail(100.0)
    assert choose_as_agent(failed, None, 101.0) == "wait"
    assert choose_as_agent(failed, None, 110.0) == "win"
