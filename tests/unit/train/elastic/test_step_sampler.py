"""What a task writes about its steps, and what it waits for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.context import Context
from insitu.base.measure import time_account
from insitu.base.measure.task_samples import Sample, read_samples
from insitu.base.measure.time_account import EVALUATION, TimeAccount
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.elastic import progress_reporter
from insitu.train.elastic.position import TRAIN, LoopPosition
from insitu.train.elastic.progress_reporter import StepSampler

TASK = TaskId("worker", 1)


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


class Group:
    """Stands for a group, whose statistics the test writes."""

    def __init__(self) -> None:
        self.stats = {"all_reduce": SimpleNamespace(waiting=0.0, moving=0.0, last=defaultdict(int))}

    def task(self, rank: int) -> str:
        return f"worker:{rank}"

    def wait(self, waiting: float, moving: float, last: int) -> None:
        stats = self.stats["all_reduce"]
        stats.waiting += waiting
        stats.moving += moving
        stats.last[last] += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_reporter, "time", made)
    monkeypatch.setattr(time_account, "time", made)
    monkeypatch.setattr(progress_reporter, "ACCOUNT", TimeAccount(made.now))
    return made


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(Paths(tmp_path), "j-1", TASK, "c", (0,), 1, incarnation=3)


@pytest.fixture
def sampler(context: Context, clock: Clock) -> StepSampler:
    made = StepSampler(context)
    made.open()
    made.begin(lambda position: 1000 + position.step)
    return made


def written(context: Context) -> list[Sample]:
    assert context.job is not None
    return read_samples(context.job.samples(TASK))


def do_step(
    sampler: StepSampler,
    clock: Clock,
    step: int,
    seconds: float = 0.2,
    wait: Callable[[], None] = lambda: None,
    **logs: Any,
) -> None:
    """Do a step, in whose exchange `wait` is called."""
    for place in ("gradient", "exchange", "update"):
        sampler.report_place(place)
        if place == "exchange":
            wait()
        clock.now += seconds / 3
    sampler.count_step(LoopPosition(4, TRAIN, 1, epoch=2, step=step), 64 * step, logs)


def test_the_first_step_is_written_and_then_two_samples_a_second(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    for step in range(1, 9):
        do_step(sampler, clock, step, loss=1 / step, text="no number")
    assert [each.steps for each in written(context)] == [1, 4, 7]
    last = written(context)[-1]
    assert (last.attempt, last.call, last.epoch, last.step, last.updates, last.rows) == (
        3,
        4,
        2,
        7,
        1007,
        448,
    )
    assert last.metrics == {"loss": 1 / 7} and last.place == "update"
    assert sum(last.seconds.values()) == pytest.approx(last.at - last.started)
    assert last.memory > 0 and sampler.steps == 8


def test_the_end_of_an_epoch_is_written_with_its_validation(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    do_step(sampler, clock, 1, loss=0.5)
    do_step(sampler, clock, 2, loss=0.25)
    sampler.end_epoch({"loss": 0.25, "val_loss": 2.0})
    do_step(sampler, clock, 1, 0.6, loss=0.2)
    assert [dict(each.metrics) for each in written(context)] == [
        {"loss": 0.5},
        {"loss": 0.25, "val_loss": 2.0},
        {"loss": 0.2},
    ]
    # Epochs that follow each other closely don't each write.
    sampler.end_epoch({"val_loss": 1.0})
    assert len(written(context)) == 3


def test_waits_for_others_are_taken_out_of_the_exchange(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    group = Group()
    sampler.watch(group)  # type: ignore[arg-type]
    do_step(sampler, clock, 1, 0.6, lambda: group.wait(0.15, 0.05, last=0))
    do_step(sampler, clock, 2, 0.6, lambda: group.wait(0.1, 0.1, last=0))
    last = written(context)[-1]
    assert {n: last.seconds[n] for n in ("exchange", "wait")} == pytest.approx(
        {"exchange": 0.15, "wait": 0.25}
    )
    assert last.last == {"worker:0": 2}


def test_waits_between_steps_are_taken_out_of_no_step(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    """As for a chief that saves at the end of an epoch, which isn't slow in its steps."""
    group = Group()
    sampler.watch(group)  # type: ignore[arg-type]
    do_step(sampler, clock, 1, 0.6)
    clock.now += 0.25
    group.wait(3.0, 0.5, last=0)
    clock.now += 3.5
    do_step(sampler, clock, 2, 0.6)
    last = written(context)[-1]
    assert last.seconds == pytest.approx(
        {"gradient": 0.4, "exchange": 0.9, "update": 0.4, "callbacks": 0.25, "wait": 3.0}
    )
    assert last.last == {}


def test_an_evaluation_is_written_as_it_begins_and_goes_on(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    do_step(sampler, clock, 1, 0.6)
    clock.now += 0.2
    with sampler.hold(EVALUATION):
        for _ in range(4):
            clock.now += 0.3
            sampler.report_place("evaluation")
        first, begun, *others = written(context)
    assert (first.activity, begun.activity) == ("callbacks", "evaluation")
    assert begun.seconds["callbacks"] == pytest.approx(0.2)
    assert [each.seconds["evaluation"] for each in others] == pytest.approx([0.6, 1.2])


def test_waits_in_an_evaluation_belong_to_it(sampler: StepSampler, context: Context, clock: Clock) -> None:
    group = Group()
    sampler.watch(group)  # type: ignore[arg-type]
    do_step(sampler, clock, 1, 0.6)
    with sampler.hold(EVALUATION):
        clock.now += 1.0
        group.wait(0.5, 0.1, last=1)
    do_step(sampler, clock, 2, 0.6)
    last = written(context)[-1]
    assert last.seconds["evaluation"] == pytest.approx(1.0) and "wait" not in last.seconds
    assert last.seconds["exchange"] == pytest.approx(0.4) and last.last == {}


def test_a_custom_loops_exchange_is_taken_out_of_its_step(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    group = Group()
    sampler.watch(group)  # type: ignore[arg-type]
    sampler.report_place("custom loop")
    clock.now += 1.0
    group.wait(0.25, 0.125, last=1)
    sampler.count_step(LoopPosition(0, TRAIN, step=1), 1, {})
    (only,) = written(context)
    assert {n: only.seconds[n] for n in ("gradient", "exchange", "wait")} == pytest.approx(
        {"gradient": 0.625, "exchange": 0.125, "wait": 0.25}
    )


def test_short_epochs_of_a_custom_loop_do_not_each_write(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    for step in range(1, 21):
        sampler.begin(lambda position: None)
        do_step(sampler, clock, step, 0.03)
        sampler.end()
    assert 5 <= len(written(context)) <= 8
    assert written(context)[-1].updates is None


def test_training_does_not_end_for_updates_that_cannot_be_read(
    sampler: StepSampler, context: Context, clock: Clock
) -> None:
    def refuse(position: LoopPosition) -> int:
        raise RuntimeError("deleted")

    sampler.begin(refuse)
    do_step(sampler, clock, 1, loss=math.nan)
    (only,) = written(context)
    assert only.updates is None and math.isnan(only.metrics["loss"])


def test_outside_a_job_nothing_is_written(tmp_path: Path, clock: Clock) -> None:
    sampler = StepSampler(Context(Paths(tmp_path)))
    sampler.open()
    do_step(sampler, clock, 1)
    sampler.end_epoch({})
    sampler.write()
    assert list(tmp_path.iterdir()) == [] and sampler.steps == 1
