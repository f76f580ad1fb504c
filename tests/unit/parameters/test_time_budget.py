"""The share of time that strangers get."""

from __future__ import annotations

import pytest

from insitu.parameters.event_loop import TimeBudget


def test_some_may_be_spent_at_once_then_a_share() -> None:
    budget = TimeBudget(0.05, 1.0, 0.0)
    assert budget.spend(1.0, 0.0) == 0.0
    assert budget.spend(0.01, 0.0) == pytest.approx(0.2)
    # Half of the pause later, half of it is left.
    assert budget.spend(0.0, 0.1) == pytest.approx(0.1)
    assert budget.spend(0.0, 0.2) == pytest.approx(0.0)


def test_a_long_quiet_time_gives_no_more_than_the_most() -> None:
    budget = TimeBudget(0.05, 1.0, 0.0)
    assert budget.spend(1.5, 1000.0) == pytest.approx(10.0)


def test_over_a_long_time_it_is_the_share() -> None:
    budget, now, spent = TimeBudget(0.05, 1.0, 0.0), 0.0, 0.0
    while now < 1000.0:
        spent += 0.006
        now += 0.006 + budget.spend(0.006, now + 0.006)
    assert spent == pytest.approx(1.0 + 0.05 * now, rel=0.01)
