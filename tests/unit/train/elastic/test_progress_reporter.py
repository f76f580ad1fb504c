"""What a task reports while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.context import Context
from insitu.base.paths import Paths
from insitu.base.progress import IDLE, Progress, read_progress
from insitu.base.spec import TaskId
from insitu.train.elastic.position import EPOCH, TEST, TRAIN, Kind, LoopPosition
from insitu.train.elastic.progress_reporter import ProgressReporter

TASK = TaskId("worker", 0)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    made = Context(Paths(tmp_path), "j-1", TASK, "c", (0,), 1)
    assert made.job is not None
    made.job.task(TASK).mkdir(parents=True)
    return made


@pytest.fixture
def reporter(context: Context) -> ProgressReporter:
    made = ProgressReporter(context)
    made.open()
    return made


def record(context: Context) -> Progress:
    assert context.job is not None
    found = read_progress(context.job.progress(TASK))
    assert found is not None
    return found


def test_a_place_alone_repeats_the_position(reporter: ProgressReporter, context: Context) -> None:
    reporter.report_place("joining")
    assert (record(context).epoch, record(context).step, record(context).place) == (-1, -1, "joining")
    reporter.rows = 12
    reporter.report(LoopPosition(0, TRAIN, 1, epoch=2, step=3), "gradient")
    assert (record(context).epoch, record(context).step, record(context).rows) == (2, 3, 12)
    reporter.report_idle()
    assert (record(context).epoch, record(context).step, record(context).place) == (2, 3, IDLE)


@pytest.mark.parametrize("kind", [TEST, EPOCH])
def test_behind_the_last_step_of_an_epoch_none_is_under_way(
    reporter: ProgressReporter, context: Context, kind: Kind
) -> None:
    """`insitu ps` had step 19 of an epoch of 18 steps while it was validated."""
    reporter.report(LoopPosition(0, kind, 1, epoch=0, step=18, test=1), "forward")
    assert (record(context).step, record(context).shown_step) == (18, 17)
    reporter.report(LoopPosition(0, kind, 1, epoch=0, step=0, test=1), "forward")
    assert (record(context).step, record(context).shown_step) == (0, 0)
    reporter.report(LoopPosition(0, TRAIN, 1, epoch=1, step=3), "gradient")
    assert (record(context).step, record(context).shown_step) == (3, 3)


def test_a_task_is_elastic_once_it_has_a_generation(reporter: ProgressReporter, context: Context) -> None:
    reporter.report_place("gradient")
    assert not record(context).elastic
    reporter.set_generation(4)
    reporter.report_place("gradient")
    assert (record(context).elastic, record(context).generation) == (True, 4)


def test_recovery_is_paused_for_as_long_as_the_innermost_call(
    reporter: ProgressReporter, context: Context
) -> None:
    reporter.set_generation(1)
    with reporter.pause_recovery():
        with reporter.pause_recovery():
            assert not reporter.elastic
        assert not reporter.elastic
        assert not record(context).elastic
    assert reporter.elastic
    assert record(context).elastic


def test_recovery_stays_disabled(reporter: ProgressReporter, context: Context) -> None:
    reporter.set_generation(1)
    reporter.report_place("gradient")
    reporter.disable_recovery()
    assert (record(context).elastic, record(context).place) == (False, "gradient")
    with reporter.pause_recovery():
        pass
    assert not reporter.elastic


def test_outside_a_job_nothing_is_written(tmp_path: Path) -> None:
    reporter = ProgressReporter(Context(Paths(tmp_path)))
    reporter.open()
    reporter.report(LoopPosition(0, TRAIN), "gradient")
    reporter.set_generation(1)
    assert list(tmp_path.iterdir()) == []
