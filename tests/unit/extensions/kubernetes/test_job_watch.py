"""What follows for a job from its JobSet, or its Jobs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from k8s_fake import FakeApi, Object

from insitu.base.paths import Paths
from insitu.extensions.kubernetes.job_watch import JobWatch, Step, WatchedJob, decide_step

RUNS, SUSPENDED = [{"spec": {"suspend": False}}], [{"spec": {"suspend": True}}]
FAILED = [
    RUNS[0],
    {"spec": {"suspend": False}, "status": {"conditions": [{"type": "Failed", "status": "True"}]}},
]
NONE: list[Object] = []
WAITING = WatchedJob(is_running=True, has_begun=False, has_ended=False, is_paused=False)
TRAINING = WatchedJob(is_running=True, has_begun=True, has_ended=False, is_paused=False)
STOPPING = WatchedJob(is_running=True, has_begun=True, has_ended=False, is_paused=True)
PAUSED = WatchedJob(is_running=False, has_begun=True, has_ended=True, is_paused=True)
DONE = WatchedJob(is_running=False, has_begun=True, has_ended=True, is_paused=False)


@pytest.mark.parametrize(
    "job, objects, step",
    [
        (WAITING, SUSPENDED, ""),
        (WAITING, NONE, ""),  # its supervisor finds out
        (TRAINING, RUNS, ""),
        (TRAINING, SUSPENDED, "pause"),
        (TRAINING, NONE, "stop"),
        (TRAINING, FAILED, "end"),
        (WAITING, FAILED, ""),  # its supervisor finds out, or makes others
        (PAUSED, FAILED, "resume"),
        (DONE, FAILED, ""),
        (STOPPING, SUSPENDED, ""),
        (STOPPING, RUNS, ""),
        (PAUSED, SUSPENDED, ""),
        (PAUSED, RUNS, "resume"),
        (PAUSED, NONE, "forget"),
        (DONE, RUNS, ""),
        (DONE, SUSPENDED, ""),
        (DONE, NONE, ""),
    ],
)
def test_steps(job: WatchedJob, objects: list[Object], step: Step) -> None:
    assert decide_step(job, objects, had_objects=True) == step


def test_a_job_that_never_had_objects_is_not_stopped_for_having_none() -> None:
    """After `insitu k8s down` and `up` its journal says that it runs until it resumes."""
    assert decide_step(TRAINING, NONE, had_objects=False) == ""
    assert decide_step(TRAINING, SUSPENDED, had_objects=False) == "pause"


def test_a_look_stops_a_job_whose_objects_an_earlier_one_has_found(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, jobs, done = JobWatch(Paths(tmp_path), api.client()), {"a": TRAINING}, []
    monkeypatch.setattr(watch, "_list_jobs", lambda: jobs)
    monkeypatch.setattr(watch, "_do", lambda step, job: done.append((step, job.root.name)))

    def look() -> list[tuple[Step, str]]:
        watch.look()
        for thread in watch._acting.values():
            thread.join()
        return [done.pop() for _ in done[:]]

    assert look() == []
    api.put("Job", "job-a", **RUNS[0])["metadata"]["labels"] = {"insitu.dev/job": "a"}
    assert look() == []
    made = {**api.objects}
    api.objects.clear()
    assert look() == [("stop", "a")]
    jobs.clear()  # it ends, and resumes
    assert look() == []
    jobs["a"] = TRAINING
    assert look() == []
    api.objects |= made
    assert look() == []


def test_a_job_that_ends_while_its_objects_are_listed_is_not_stopped(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, states = JobWatch(Paths(tmp_path), api.client()), [{"a": TRAINING}, {"a": DONE}]
    monkeypatch.setattr(watch, "_list_jobs", lambda: states.pop(0))
    api.put("Job", "job-a", **FAILED[1])["metadata"]["labels"] = {"insitu.dev/job": "a"}
    watch.look()
    assert not watch._acting and not states


def test_only_what_runs_is_stopped_and_only_what_has_ended_resumes() -> None:
    for flags in itertools.product((False, True), repeat=4):
        job = WatchedJob(*flags)
        for objects in (NONE, RUNS, SUSPENDED, FAILED):
            step = decide_step(job, objects, had_objects=True)
            assert step not in ("stop", "end", "pause") or job.is_running
            assert step != "resume" or (job.has_ended and not job.is_running and objects in (RUNS, FAILED))
