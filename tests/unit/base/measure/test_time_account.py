"""The account of a process adds up to its age, whatever it does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.measure import time_account
from insitu.base.measure.time_account import (
    ACTIVITIES,
    CALLBACKS,
    CHECKPOINT,
    COMPILE,
    EVALUATION,
    EXCHANGE,
    GRADIENT,
    RECOVERY,
    SCRIPT,
    UPDATE,
    WAIT,
    TimeAccount,
)
from insitu.base.roster import CONNECTING, RECOVERING


class Clock:
    """Moves on by a second with each look."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> TimeAccount:
    monkeypatch.setattr(time_account, "time", Clock())
    return TimeAccount(0.0)


def test_time_belongs_to_what_was_entered_last(account: TimeAccount) -> None:
    account.enter(SCRIPT)
    account.enter_place("gradient")
    account.enter_place("exchange")
    account.enter_place("update")
    assert account.read() == {"import": 1, "script": 1, "gradient": 1, "exchange": 1, "update": 1}
    assert account.activity == UPDATE


def test_the_first_call_of_each_function_compiles_it(account: TimeAccount) -> None:
    account.expect_compile()
    for _ in range(2):
        account.enter_place("gradient")
        account.enter_place("exchange")
        account.enter_place("update")
        account.enter(CALLBACKS)
    assert account.read() == {
        "import": 1,
        "compile": 2,
        "exchange": 2,
        "callbacks": 2,
        "gradient": 1,
        "update": 1,
    }


def test_what_is_held_takes_all_but_waiting_and_recovery(account: TimeAccount) -> None:
    account.enter(CALLBACKS)
    with account.hold(EVALUATION):
        account.enter_place("gradient")
        account.enter_place(CONNECTING)
        account.enter_place(RECOVERING)
        account.enter_place("gradient")
        with account.hold(CHECKPOINT):
            account.enter(GRADIENT)
    assert account.activity == CALLBACKS and not account.is_held
    assert account.read() == {
        "import": 1,
        "callbacks": 2,
        "evaluation": 4,
        "wait": 1,
        "recovery": 1,
        "checkpoint": 2,
    }


def test_only_what_is_there_can_be_moved(account: TimeAccount) -> None:
    account.enter_place("exchange")
    account.enter(CALLBACKS)
    assert account.move(EXCHANGE, WAIT, 5.0) == 1.0
    assert account.move(EXCHANGE, WAIT, -1.0) == 0.0
    assert account.read() == {"import": 1, "wait": 1, "callbacks": 1}


def test_waits_lie_in_the_activity_that_they_came_in(account: TimeAccount) -> None:
    waits = {GRADIENT: (0.25, 0.5), CALLBACKS: (9.0, 9.0), EVALUATION: (0.5, 0.25)}
    account.split_waits(lambda activity: waits.get(activity, (0.0, 0.0)))
    for activity in (GRADIENT, CALLBACKS, UPDATE, EVALUATION):
        account.enter(activity)
    assert account.read() == {
        "import": 2,
        "gradient": 0.25,
        "exchange": 0.5,
        "wait": 1.25,  # callbacks had no more than a second
        "update": 1,
        "evaluation": 1,
    }


def test_a_standby_begins_its_account_as_it_becomes_a_task(account: TimeAccount) -> None:
    account.enter(SCRIPT)
    account.restart()
    account.enter(SCRIPT)
    assert account.read() == {"import": 1, "script": 1}


def test_the_account_of_this_process_began_with_it() -> None:
    assert time_account.ACCOUNT.age > 0.0
    assert sum(time_account.ACCOUNT.read().values()) == pytest.approx(time_account.ACCOUNT.age, rel=0.01)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([*ACTIVITIES, "hold", "release", "compile", "move"]), max_size=60))
def test_seconds_add_up_to_the_age(script: list[str]) -> None:
    account = TimeAccount(0.0)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time_account, "time", clock)
        held = []
        for what in script:
            match what:
                case "hold":
                    held.append(account.hold(COMPILE))
                    held[-1].__enter__()
                case "release":
                    if held:
                        held.pop().__exit__(None, None, None)
                case "compile":
                    account.expect_compile()
                    account.enter_place("step")
                case "move":
                    account.move(EXCHANGE, WAIT, 2.5)
                case _:
                    account.enter(what)
        seconds = account.read()
        assert sum(seconds.values()) == pytest.approx(clock.now)
        assert min(seconds.values(), default=0.0) >= 0.0
        if WAIT not in script and RECOVERY not in script and held:
            account.enter(GRADIENT)
            assert account.activity == COMPILE
