"""A job that stands still is noticed, one that moves or doesn't tell is left alone."""

from __future__ import annotations

import pytest

from insitu.base.progress import IDLE, Progress
from insitu.base.roster import RECOVERING
from insitu.base.spec import TaskId
from insitu.cluster.decide.stall import Stall, StallWatch

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def at(epoch: int, step: int, place: str = "exchange") -> Progress:
    return Progress(epoch, step, 0, 0.0, place)


def test_a_job_that_stands_still_is_named_with_its_places() -> None:
    watch = StallWatch(5.0)
    assert watch.observe({W0: at(1, 2), W1: at(1, 3, "")}, 0.0) is None
    assert watch.observe({W0: at(1, 2), W1: at(1, 3, "")}, 4.9) is None
    assert watch.observe({W0: at(1, 2), W1: at(1, 3, "")}, 5.0) == Stall(
        "no task made progress for 5 s: worker:0 at epoch 2 step 3 (exchange); "
        "worker:1 at epoch 2 step 4 (place unknown); waiting for worker:1",
        (W1,),
    )


def test_one_task_that_moves_is_enough() -> None:
    watch = StallWatch(5.0)
    for second in range(20):
        assert watch.observe({W0: at(0, 0), W1: at(0, second)}, float(second)) is None


def test_tasks_that_tell_nothing_or_do_not_train_yet_are_not_judged() -> None:
    watch = StallWatch(5.0)
    for second in (0.0, 100.0, 200.0):
        assert watch.observe({W0: None, W1: at(-1, -1)}, second) is None


def test_idle_tasks_may_take_their_time_until_training_is_over() -> None:
    watch = StallWatch(5.0)
    records = {W0: at(3, 9, "idle"), W1: None}
    assert watch.observe(records, 0.0) is None
    assert watch.observe(records, 9.0) is None
    assert watch.observe(records, 9.0, idle_too=True) is not None


def test_a_task_that_waits_for_an_idle_one_is_stuck() -> None:
    watch = StallWatch(5.0)
    records = {W0: at(3, 9, "idle"), W1: at(3, 9)}
    watch.observe(records, 0.0)
    assert watch.observe(records, 5.0) == Stall(
        "no task made progress for 5 s: worker:1 at epoch 4 step 10 (exchange)"
    )


def test_the_one_that_all_wait_for_is_named_though_others_moved_later() -> None:
    watch = StallWatch(5.0)
    watch.observe({W0: at(1, 2), W1: at(1, 2, "gradient")}, 0.0)
    watch.observe({W0: at(1, 2, RECOVERING), W1: at(1, 2, "gradient")}, 4.0)
    stall = watch.observe({W0: at(1, 2, RECOVERING), W1: at(1, 2, "gradient")}, 5.0)
    assert stall is not None and stall.culprits == (W1,)
    assert "worker:1 at epoch 2 step 3 (gradient); waiting for worker:1" in stall.text


def test_of_those_that_wait_it_is_the_suspended_one() -> None:
    watch = StallWatch(5.0)
    records = {W0: at(1, 2), W1: at(1, 2)}
    watch.observe(records, 0.0)
    suspended = watch.observe(records, 5.0, stopped=lambda: {W1})
    unknown = watch.observe(records, 5.0)
    assert suspended is not None and suspended.culprits == (W1,)
    assert unknown is not None and unknown.culprits == ()


def test_a_task_that_has_ended_is_forgotten() -> None:
    watch = StallWatch(5.0)
    watch.observe({W0: at(0, 0), W1: at(0, 9)}, 0.0)
    watch.observe({W0: at(0, 1)}, 3.0)
    assert watch.observe({W0: at(0, 1)}, 7.0) is None
    assert watch.observe({W0: at(0, 1)}, 8.0) is not None


def test_a_record_that_is_just_being_written_counts_as_no_change() -> None:
    watch = StallWatch(5.0)
    watch.observe({W0: at(0, 0)}, 0.0)
    watch.observe({W0: None}, 3.0)
    assert watch.observe({W0: at(0, 0)}, 5.0) is not None


def test_a_task_that_begins_anew_starts_afresh() -> None:
    watch = StallWatch(5.0)
    watch.observe({W0: at(0, 0)}, 0.0)
    watch.begin((W0,))
    assert watch.observe({W0: at(0, 0)}, 9.0) is None


def test_who_waits_for_one_that_begins_gets_the_whole_time_again() -> None:
    watch = StallWatch(5.0)
    waits = {W0: at(0, 3, RECOVERING)}
    watch.observe(waits, 0.0)
    watch.begin((W1,))
    assert watch.observe(waits, 4.0) is None
    assert watch.observe(waits, 8.0) is None
    assert watch.observe(waits, 9.0) is not None


@pytest.mark.parametrize("place", ["exchange", RECOVERING])
def test_one_that_is_suspended_is_found_however_often_others_begin_anew(place: str) -> None:
    watch = StallWatch(5.0)
    assert watch.observe({W0: at(0, 3, place), W1: at(0, 3, RECOVERING)}, 0.0) is None
    for second in range(1, 5):
        # It can't join, ends, and begins anew.
        watch.begin((W1,), {W0})
        found = watch.observe({W0: at(0, 3, place), W1: None}, second, stopped=lambda: {W0})
        assert found is None
    found = watch.observe({W0: at(0, 3, place), W1: None}, 5.0, stopped=lambda: {W0})
    assert found is not None and found.culprits == (W0,)


def test_a_task_that_has_stopped_training_may_take_its_time():
    watch = StallWatch(timeout=10.0)
    ended = Progress(2, 5, 100, 1.0, IDLE)
    for second in range(0, 100, 5):
        assert watch.observe({W0: ended}, second) is None
