"""Rates and curves out of the samples of tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.measure.task_samples import Sample
from insitu.cluster.client.numbers import (
    compute_rates,
    find_newest,
    join_curves,
    make_curve,
    summarize_metrics,
)


def sample(at: float, steps: int, attempt: int = 1, **more: object) -> Sample:
    values = {"rows": 64 * steps, "cpu": 2.0 * at, "memory": 1000, "seconds": {"gradient": 0.75 * at}}
    return Sample(at=at, attempt=attempt, started=0.0, steps=steps, **{**values, **more})  # type: ignore[arg-type]


def test_rates_are_of_the_last_ten_seconds_of_training() -> None:
    samples = [sample(float(at), 10 * at) for at in range(1, 31)]
    samples += [sample(31.0, 700), sample(32.0, 720)]
    rates = compute_rates(samples)
    assert rates.step_seconds == pytest.approx(10 / (720 - 220))
    assert rates.rows_per_second == pytest.approx(64 * 50)
    assert rates.split == pytest.approx({"gradient": 7.5 / 500})
    assert (rates.cpu, rates.memory, rates.at) == (2.0, 1000, 32.0)


def test_what_follows_the_last_step_does_not_slow_it_down() -> None:
    training = [sample(1.0, 1), sample(2.0, 11), sample(3.0, 21)]
    assert compute_rates([*training, sample(9.0, 21, place="idle")]).step_seconds == pytest.approx(0.1)


def test_evaluations_between_two_steps_are_no_part_of_them() -> None:
    first = sample(1.0, 10, seconds={"gradient": 1.0})
    second = sample(11.0, 30, seconds={"gradient": 4.5, "update": 0.5, "evaluation": 5.0, "checkpoint": 1.0})
    rates = compute_rates([first, second])
    assert rates.step_seconds == pytest.approx(4.0 / 20) and rates.rows_per_second == pytest.approx(64 * 5)
    assert rates.split == pytest.approx({"gradient": 3.5 / 20, "update": 0.5 / 20})


def test_a_new_process_has_no_rates_before_its_second_sample() -> None:
    rates = compute_rates([sample(5.0, 100), sample(9.0, 1, attempt=2)])
    assert rates.rows_per_second is None and rates.step_seconds is None and rates.split == {}
    assert rates.memory == 1000
    # The time before the first step is no part of a step.
    assert compute_rates([sample(1.0, 0), sample(9.0, 1)]).step_seconds is None


def test_cores_are_those_of_the_last_seconds_also_without_a_step() -> None:
    busy = [sample(float(at), 0, cpu=float(at)) for at in range(1, 20)]
    idle = [sample(float(at), 0, cpu=19.0) for at in range(20, 40)]
    assert compute_rates(busy[:1]).cpu == 1.0
    assert compute_rates(busy).cpu == pytest.approx(1.0)
    assert compute_rates([*busy, *idle]).cpu == 0.0
    after = [sample(1.0, 10, cpu=1.0), sample(2.0, 20, cpu=2.0), sample(12.0, 20, cpu=2.0)]
    assert compute_rates(after).cpu == 0.0


def test_steps_longer_than_the_window_are_measured_too() -> None:
    assert compute_rates([sample(1.0, 1), sample(61.0, 2)]).step_seconds == 60.0


def logged(updates: int, loss: float, attempt: int = 1, call: int = 0, **more: float) -> Sample:
    return Sample(
        at=float(updates), attempt=attempt, started=0.0, call=call, updates=updates, steps=1,
        metrics={"loss": loss, **more},
    )  # fmt: skip


def points(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    return [(point.updates, point.metrics["loss"]) for point in make_curve(samples)]


def test_steps_that_are_done_again_replace_the_first_ones() -> None:
    first = [logged(10, 1.0), logged(20, 0.9), logged(30, 0.8)]
    again = [logged(20, 0.85, attempt=2), logged(40, 0.5, attempt=2)]
    assert points([*first, *again]) == [(10, 1.0), (20, 0.85), (40, 0.5)]


def test_logs_of_an_epochs_end_are_added_to_those_of_its_last_step() -> None:
    (point,) = make_curve([logged(10, 1.0), logged(10, 1.0, val_loss=2.0), logged(10, 1.0)])
    assert point.metrics == {"loss": 1.0, "val_loss": 2.0}


def test_each_fit_has_its_own_part_of_the_curve() -> None:
    curve = make_curve([logged(10, 1.0), logged(20, 0.9), logged(5, 3.0, call=1)])
    assert [(point.call, point.updates) for point in curve] == [(0, 10), (0, 20), (1, 5)]


def test_samples_without_a_step_are_no_points() -> None:
    assert make_curve([Sample(at=1.0, attempt=1, started=0.0)]) == []


def test_a_curve_goes_on_with_other_tasks_where_one_ends() -> None:
    first, second = (
        make_curve([logged(10, 1.0), logged(20, 0.9)]),
        make_curve([logged(15, 0.0), logged(25, 0.8)]),
    )
    assert [point.updates for point in join_curves([first, second])] == [10, 20, 25]
    assert join_curves([[], second]) == second
    assert join_curves([]) == []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20))))
def test_curves_are_in_order_without_repetition(updates: list[tuple[int, int]]) -> None:
    curve = make_curve([logged(each, 1.0, call=call) for call, each in updates])
    keys = [(point.call, point.updates) for point in curve]
    assert keys == sorted(set(keys))
    if updates:
        assert keys[-1] == updates[-1]


def test_json_has_no_infinite_numbers() -> None:
    assert summarize_metrics({"a": 1.5, "b": math.nan, "c": math.inf}) == {"a": 1.5, "b": None, "c": None}


def test_the_newest_logs_are_those_of_the_last_fit() -> None:
    first, second = logged(30, 1.0), logged(5, 2.0, call=1)
    assert find_newest([first, second, sample(99.0, 1, call=1, updates=7)]) == second
    assert find_newest([sample(1.0, 1), sample(2.0, 1)]) == sample(2.0, 1)
    assert find_newest([]) is None
    tested = logged(30, 1.0, val_loss=2.0)
    assert find_newest([logged(20, 0.5), tested, first]) == tested
