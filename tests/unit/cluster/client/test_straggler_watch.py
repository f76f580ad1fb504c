"""Stragglers are found by looking at a running job's records for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.paths import JobPaths
from insitu.base.progress import Progress, ProgressWriter
from insitu.base.spec import TaskId
from insitu.cluster.client import straggler_watch
from insitu.cluster.client.straggler_watch import watch_stragglers

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def test_without_training_nobody_is_watched(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    ProgressWriter(job.progress(W0)).write(-1, -1, 0, "")
    assert watch_stragglers(job, [W0, W1], seconds=3600.0) == []


def test_a_task_that_comes_last_again_and_again_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(straggler_watch.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(straggler_watch.time, "sleep", lambda seconds: None)
    records = ((Progress(0, step, 0, step + late, "exchange")) for step in range(9) for late in (0.0, 0.25))
    monkeypatch.setattr(straggler_watch, "read_progress", lambda path: next(records))
    (found,) = watch_stragglers(JobPaths(tmp_path), [W0, W1], seconds=8.5)
    assert (found.task, found.share, found.seconds) == (W1, 1.0, 0.25)
