"""A job whose processes all died was alive until one of them last said so, however long that is ago."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.base.measure.task_samples import Sample, SampleWriter
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cluster import measure_goodput, read_status, resume_job, submit
from insitu.cluster.client import job_requests, submission
from insitu.cluster.decide import LaunchedEvent, SubmittedEvent, advance
from insitu.cluster.job_files import Heartbeat, find_last_sign
from insitu.cluster.job_files.journal import Journal
from insitu.options import JobOptions
from insitu.service import summarize_job

W0 = TaskId("worker", 0)
AGO = 3600.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    """A job of an hour ago whose processes have all vanished after a second of its journal."""
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    monkeypatch.setattr(job_requests, "start_supervisor", lambda job, lock, variables: None)
    job = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1)))
    spec = json.loads(job.spec.read_text())
    spec["created"] -= AGO
    job.spec.write_text(json.dumps(spec))
    journal = Journal(job.journal)
    state = journal.state()
    for second, event in enumerate((SubmittedEvent(), LaunchedEvent(((W0, 7),), (1,)))):
        state, actions = advance(state, event, spec["created"] + second)
        journal.record(spec["created"] + second, event, actions, state)
    return job


def created(job: JobPaths) -> float:
    return float(json.loads(job.spec.read_text())["created"])


def write_sample(job: JobPaths, second: float, callbacks: float) -> None:
    at = created(job) + second
    sample = Sample(at, 1, created(job) + 1, activity="callbacks", steps=9, seconds={"callbacks": callbacks})
    SampleWriter(job.samples(W0)).write(sample)


def test_the_last_sign_is_the_latest_of_all(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_last_sign(job) == created(job) + 1
    write_sample(job, 5.0, 4.0)
    assert find_last_sign(job) == created(job) + 5
    os.utime(job.journal)  # as a copy of the folder does
    job.output.touch()
    monkeypatch.setattr(time, "time", lambda: created(job) + 9.0)
    Heartbeat(job).beat()
    assert find_last_sign(job) == pytest.approx(created(job) + 9, abs=0.001)
    job.heartbeat.write_bytes(b"nan")
    assert find_last_sign(job) == created(job) + 5
    job.heartbeat.write_bytes(b"no time")
    assert find_last_sign(job) == created(job) + 5
    write_sample(job, 2 * AGO, 4.0)  # of a host whose clock is ahead
    assert find_last_sign(job) == created(job) + 9.0


def test_a_heartbeat_needs_no_further_room(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, clock = Heartbeat(job), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heartbeat.beat()
    first = job.heartbeat.read_bytes()
    monkeypatch.setattr(time, "time", lambda: 7.0)
    heartbeat.beat()
    assert job.heartbeat.read_bytes() == first  # it isn't due
    clock[0] = 1.0
    heartbeat.beat()
    assert float(job.heartbeat.read_bytes()) == 7.0 and job.heartbeat.stat().st_size == len(first)


def test_a_job_that_died_at_once_has_its_own_time_alone(job: JobPaths) -> None:
    write_sample(job, 9.0, 6.0)
    for _ in range(2):
        status = read_status(job)
        assert status.ended == pytest.approx(created(job) + 9)
        assert summarize_job(status)["ended"] == status.ended
        goodput = measure_goodput(job, status)
        assert goodput.wall == pytest.approx(9.0)
        assert goodput.seconds == pytest.approx({"queueing": 1.0, "import": 2.0, "callbacks": 6.0}, abs=1e-5)


def test_until_it_goes_on_it_was_away(job: JobPaths) -> None:
    write_sample(job, 9.0, 6.0)
    resume_job(job)
    (ended, _), *_ = [
        (entry.at, entry.event) for entry in Journal(job.journal).entries()
        if entry.event["event"] == "ControllerLost"
    ]  # fmt: skip
    assert ended == pytest.approx(created(job) + 9)
    seconds = measure_goodput(job).seconds
    assert seconds["away"] == pytest.approx(AGO - 9, rel=0.05)
    del seconds["away"]  # type: ignore[attr-defined]
    kept = {name: value for name, value in seconds.items() if value > 0.5}
    assert kept == pytest.approx({"queueing": 1.0, "import": 2.0, "callbacks": 6.0}, abs=1e-5)
