"""Jobs that have ended are deleted together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner
from job_runs import Insitu

from insitu.base.errors import InputError
from insitu.cluster import Journal, list_job_ids, submit
from insitu.cluster.client import submission
from insitu.cluster.decide.events import ControllerLostEvent, SubmittedEvent
from insitu.cluster.decide.job import advance
from insitu.cluster.job_files import take_lock
from insitu.options import JobOptions

NOW = 1_000_000.0
DAY = 86400.0


@pytest.fixture
def insitu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Insitu:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setenv("INSITU_HOME", str(insitu.paths.home))
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    monkeypatch.setattr("insitu.cli.prune.time.time", lambda: NOW)
    return insitu


def make_job(insitu: Insitu, name: str, ended: float, size: int) -> str:
    job = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), name=name)))
    state = Journal(job.journal).state()
    for event in (SubmittedEvent(), ControllerLostEvent()):
        state, actions = advance(state, event, ended)
        Journal(job.journal).record(ended, event, actions, state)
    (job.code / "model.keras").write_bytes(bytes(size))
    return job.root.name


def prune(*arguments: str) -> Any:
    return CliRunner().run(["prune", *arguments])


def test_jobs_are_pruned_by_age_and_size_after_they_were_shown(insitu: Insitu) -> None:
    old = make_job(insitu, "old", NOW - 9 * DAY, 10)
    large = make_job(insitu, "large", NOW - DAY, 5_000_000)
    both = make_job(insitu, "both", NOW - 9 * DAY, 5_000_000)
    shown = prune("--older-than", "7d")
    assert isinstance(shown.exception, InputError) and "Give --yes" in str(shown.exception)
    assert old in shown.stdout and both in shown.stdout and large not in shown.stdout
    assert list_job_ids(insitu.paths) == sorted([old, large, both])
    done = json.loads(prune("--older-than", "7d", "--larger-than", "1MB", "--yes", "--json").stdout)
    assert [each["name"] for each in done] == [both] and done[0]["bytes"] > 5_000_000
    lock = take_lock(insitu.job(large).controller)  # it runs
    assert "Deleted the job old" in prune("--yes").stderr
    assert list_job_ids(insitu.paths) == [large]
    assert "No job that has ended" in prune("--yes").stderr
    os.close(lock)
