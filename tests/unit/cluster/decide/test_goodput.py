"""Every second of a job is accounted for, whatever happened to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.measure.task_samples import Sample
from insitu.base.measure.time_account import ACTIVITIES
from insitu.cluster.decide.goodput import (
    JOB_ACTIVITIES,
    Life,
    account_for_tasks,
    average,
    find_absences,
    find_lives,
    validate,
)

W0, W1 = "worker:0", "worker:1"


def launched(at: float, *tasks: str) -> tuple[float, Mapping[str, Any]]:
    return at, {"event": "Launched", "processes": [[task, 1] for task in tasks]}


def exited(at: float, task: str, code: int, attempt: int) -> tuple[float, Mapping[str, Any]]:
    return at, {"event": "TaskExited", "task": task, "code": code, "attempt": attempt}


def sample(at: float, updates: int | None, attempt: int = 1, steps: int = 1, **seconds: float) -> Sample:
    return Sample(
        at=at,
        attempt=attempt,
        started=0.0,
        updates=updates,
        steps=steps,
        place="gradient",
        seconds={name.rstrip("_"): value for name, value in seconds.items()},
    )


def test_the_journal_tells_when_processes_lived() -> None:
    entries = [
        (0.0, {"event": "Submitted"}),
        launched(1.0, W0, W1),
        launched(1.5, W0),  # told again by a controller that took over
        exited(5.0, W1, -9, 1),
        launched(6.0, W1),
        exited(9.0, W0, 0, 1),
        (12.0, {"event": "ControllerLost"}),
        (20.0, {"event": "Resumed"}),
        launched(21.0, W0),
    ]
    assert find_lives(entries) == {
        W0: [Life(1.0, 9.0, 0, 1), Life(21.0, incarnation=2)],
        W1: [Life(1.0, 5.0, -9, 1), Life(6.0, 12.0, incarnation=2)],
    }
    assert find_absences(entries) == [(12.0, 20.0)]


def test_samples_say_what_a_process_did() -> None:
    lives = {W0: [Life(2.0, 12.0, 0, 1)]}
    own = [sample(5.0, 1, import_=2.0, compile=0.5), sample(11.0, 9, import_=2.0, compile=0.5, gradient=6.0)]
    (account,) = account_for_tasks(0.0, 14.0, lives, {W0: own})
    validate(account, 14.0)
    assert account.seconds == pytest.approx(
        {"queueing": 2.0, "import": 2.5, "compile": 0.5, "gradient": 6.0, "script": 1.0, "idle": 2.0}
    )


def test_a_replacement_costs_what_passes_until_its_first_step() -> None:
    lives = {W0: [Life(0.0)], W1: [Life(0.0, 5.0, -9, 1), Life(6.0, incarnation=2)]}
    samples = {
        W0: [sample(4.0, 40, gradient=4.0), sample(10.0, 60, gradient=7.0, recovery=3.0)],
        W1: [
            sample(4.0, 40, gradient=4.0),
            sample(8.0, 41, attempt=2, import_=1.5, recovery=0.5),
            sample(10.0, 60, attempt=2, steps=20, import_=1.5, recovery=0.5, gradient=2.0),
        ],
    }
    survivor, lost = account_for_tasks(0.0, 10.0, lives, samples)
    assert survivor.seconds == pytest.approx({"gradient": 7.0, "recovery": 3.0})
    assert lost.seconds == pytest.approx({"gradient": 6.0, "recovery": 4.0})


def test_steps_that_are_done_again_are_lost_work() -> None:
    """All tasks were killed after 100 updates; the next attempt begins with the checkpoint of 60."""
    lives = {W0: [Life(0.0, 10.0, -9, 1), Life(11.0, 20.0, 0, 2)]}
    own = [
        sample(10.0, 100, gradient=10.0),
        sample(12.0, 60, attempt=2, import_=1.0),
        sample(17.0, 110, attempt=2, import_=1.0, gradient=5.0),
        sample(20.0, 140, attempt=2, import_=1.0, gradient=8.0),
    ]
    (account,) = account_for_tasks(0.0, 20.0, lives, {W0: own})
    assert account.seconds == pytest.approx({"gradient": 14.0, "recovery": 2.0, "redone": 4.0})


def test_steps_of_a_fit_that_was_not_reached_before_are_not_done_again() -> None:
    lives = {W0: [Life(0.0, 10.0, -9, 1), Life(10.0, 20.0, 0, 2)]}
    first = Sample(at=10.0, attempt=1, started=0.0, call=1, updates=50, steps=9, seconds={"gradient": 10.0})
    later = [
        Sample(at=12.0, attempt=2, started=0.0, call=1, updates=1, steps=1, seconds={"import": 2.0}),
        Sample(
            at=16.0,
            attempt=2,
            started=0.0,
            call=1,
            updates=50,
            steps=50,
            seconds={"import": 2.0, "gradient": 4.0},
        ),
        Sample(
            at=20.0,
            attempt=2,
            started=0.0,
            call=2,
            updates=9,
            steps=59,
            seconds={"import": 2.0, "gradient": 8.0},
        ),
    ]
    (account,) = account_for_tasks(0.0, 20.0, lives, {W0: [first, *later]})
    assert account.seconds == pytest.approx({"gradient": 14.0, "recovery": 2.0, "redone": 4.0})


def test_a_job_that_had_ended_is_away_until_it_is_resumed() -> None:
    lives = {W0: [Life(0.0, 5.0, 1, 1), Life(31.0, incarnation=2)]}
    (account,) = account_for_tasks(0.0, 32.0, lives, {W0: []}, [(6.0, 30.0)])
    assert account.seconds == pytest.approx({"import": 5.0, "idle": 1.0, "away": 24.0, "recovery": 2.0})


def test_before_any_process_a_job_queues_and_a_task_that_joins_later_was_idle() -> None:
    none, late = account_for_tasks(0.0, 8.0, {W1: [Life(2.0)]}, {W0: [], W1: []})
    assert none.seconds == {"queueing": 2.0, "idle": 6.0}
    assert late.seconds == {"queueing": 2.0, "import": 6.0}
    accounts = account_for_tasks(0.0, 8.0, {W0: [Life(1.0)], W1: [Life(5.0)]}, {W1: []})
    assert accounts[0].seconds == {"queueing": 1.0, "idle": 4.0, "import": 3.0}


TIMES = st.floats(0.0, 50.0)


@st.composite
def histories(
    draw: st.DrawFn,
) -> tuple[list[tuple[float, Mapping[str, Any]]], dict[str, list[Sample]], float]:
    """A journal of launches, ends, lost controllers and resumes, samples that clocks and kills have spoiled,
    and a time of the end, which may be before all of it."""
    entries, samples = [], {}
    for task in (W0, W1):
        at, own = 0.0, []
        for attempt in range(1, draw(st.integers(0, 4)) + 1):
            at += draw(TIMES)
            entries.append(launched(at, task))
            seconds = dict.fromkeys(ACTIVITIES, 0.0)
            steps, seen = 0, at
            for _ in range(draw(st.integers(0, 5))):
                # Clocks of hosts differ, and may be set.
                seen += draw(st.floats(-3.0, 9.0))
                seconds[draw(st.sampled_from(ACTIVITIES))] += draw(st.floats(-0.5, 9.0))
                steps += draw(st.integers(0, 9))
                updates = draw(st.none() | st.integers(0, 40))
                call = draw(st.integers(0, 2))
                own.append(
                    Sample(
                        at=seen,
                        attempt=attempt,
                        started=at,
                        call=call,
                        updates=updates,
                        steps=steps,
                        place=draw(st.sampled_from(["gradient", "exchange", "idle", ""])),
                        seconds=dict(seconds),
                    )
                )
            at += draw(TIMES)
            end = draw(st.sampled_from(["exit", "lost", "none"]))
            if end == "exit":
                entries.append(exited(at, task, draw(st.sampled_from([0, 1, -9])), attempt))
            elif end == "lost":
                entries.append((at, {"event": "ControllerLost"}))
            if draw(st.booleans()):
                entries.append((at + 1.0, {"event": "Resumed"}))
        samples[task] = own
    entries.sort(key=lambda entry: entry[0])
    return entries, samples, draw(st.floats(0.0, 400.0))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.floats(0.0, 20.0))
def test_accounts_add_up_to_the_wall_time(
    history: tuple[list[tuple[float, Mapping[str, Any]]], dict[str, list[Sample]], float], created: float
) -> None:
    entries, samples, wall = history
    lives = find_lives(entries)
    accounts = account_for_tasks(created, created + wall, lives, samples, find_absences(entries))
    assert [account.task for account in accounts] == [W0, W1]
    for account in accounts:
        validate(account, wall)
        assert len(account.segments) <= 200
        assert set(account.seconds) <= set(JOB_ACTIVITIES)
    assert sum(average(accounts).values()) == pytest.approx(wall, rel=0.01, abs=1e-6)


def test_a_long_job_has_few_segments() -> None:
    own = [sample(float(at), at, steps=at, gradient=float(at)) for at in range(1, 3001)]
    (account,) = account_for_tasks(0.0, 3001.0, {W0: [Life(0.0)]}, {W0: own})
    validate(account, 3001.0)
    assert 100 < len(account.segments) <= 200


def test_partitions_that_move_before_the_tasks_start_are_copying() -> None:
    lives = {W0: [Life(6.0, 12.0, 0, 1)], W1: [Life(7.0, 12.0, 0, 1)]}
    copies = [(4.0, 5.0), (1.0, 3.0), (2.0, 4.5), (11.0, 13.0)]  # the last one: while they run
    first, second = account_for_tasks(0.0, 12.0, lives, {W0: [], W1: []}, copies=copies)
    for account in (first, second):
        validate(account, 12.0)
        assert account.seconds["copying"] == pytest.approx(4.0) and account.seconds["queueing"] == 2.0
    assert second.seconds["idle"] == 1.0


def test_a_server_that_was_replaced_is_as_good_as_new_with_its_first_sample() -> None:
    lives = {"ps:0": [Life(0.0, 4.0, -9, 1), Life(5.0, 10.0, 0, 2)]}
    own = [sample(4.0, None, steps=0, wait=3.0, update=1.0)]
    own += [sample(6.0, None, 2, 0, import_=1.0), sample(10.0, None, 2, 0, import_=1.0, wait=4.0)]
    (account,) = account_for_tasks(0.0, 10.0, lives, {"ps:0": own}, trains=False)
    validate(account, 10.0)
    assert account.seconds == pytest.approx({"wait": 7.0, "update": 1.0, "recovery": 2.0})
