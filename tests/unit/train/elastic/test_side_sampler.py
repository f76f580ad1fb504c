"""Parameter servers and evaluators say what their time goes to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.base.context import Context
from insitu.base.measure.task_samples import read_samples
from insitu.base.measure.time_account import TimeAccount
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.elastic import SideSampler, side_sampler


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> TimeAccount:
    made = TimeAccount(0.0)
    monkeypatch.setattr(side_sampler, "ACCOUNT", made)
    return made


def test_processor_time_while_waiting_is_work(
    tmp_path: Path, account: TimeAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(paths=Paths(tmp_path), job_id="job", task=TaskId("ps", 0))
    used = iter([1.0, 1.25, 1.5])
    monkeypatch.setattr(side_sampler, "_read_cpu", lambda: next(used))
    sampler = SideSampler(context)
    account.enter("wait")
    account._seconds["wait"] = 10.0
    sampler.write("update")
    sampler.write("update")  # too early
    sampler.write("update", now=True)
    assert context.job is not None
    first, second = read_samples(context.job.samples(context.task))
    assert first.seconds["update"] == 0.25 and second.seconds["update"] == 0.5
    assert second.seconds["wait"] >= 9.5 and second.steps == 0 and second.memory > 0
    assert second.place == "serving"


def test_outside_a_job_nothing_is_written(tmp_path: Path, account: TimeAccount) -> None:
    SideSampler(Context(paths=Paths(tmp_path))).write(now=True)
    assert os.listdir(tmp_path) == []
