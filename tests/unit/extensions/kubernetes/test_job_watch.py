"""What follows for a job from its JobSet, or its Jobs."""

from __future__ import annotations

import itertools

import pytest

from insitu.extensions.kubernetes.job_watch import Step, WatchedJob, decide_step

RUNS, SUSPENDED = [{"spec": {"suspend": False}}], [{"spec": {"suspend": True}}]
NONE: list[dict[str, dict[str, bool]]] = []
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
def test_steps(job: WatchedJob, objects: list[dict[str, dict[str, bool]]], step: Step) -> None:
    assert decide_step(job, objects) == step


def test_only_what_runs_is_stopped_and_only_what_has_ended_resumes() -> None:
    for flags in itertools.product((False, True), repeat=4):
        job = WatchedJob(*flags)
        for objects in (NONE, RUNS, SUSPENDED):
            step = decide_step(job, objects)
            assert step not in ("stop", "pause") or job.is_running
            assert step != "resume" or (job.has_ended and not job.is_running and objects is RUNS)
