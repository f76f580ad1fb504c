"""What follows for a job from its JobSet."""

from __future__ import annotations

import itertools

import pytest

from insitu.extensions.kubernetes.job_watch import Step, WatchedJob, decide_step

RUNS, SUSPENDED = {"spec": {"suspend": False}}, {"spec": {"suspend": True}}
WAITING = WatchedJob(is_running=True, has_begun=False, has_ended=False, is_paused=False)
TRAINING = WatchedJob(is_running=True, has_begun=True, has_ended=False, is_paused=False)
STOPPING = WatchedJob(is_running=True, has_begun=True, has_ended=False, is_paused=True)
PAUSED = WatchedJob(is_running=False, has_begun=True, has_ended=True, is_paused=True)
DONE = WatchedJob(is_running=False, has_begun=True, has_ended=True, is_paused=False)


@pytest.mark.parametrize(
    "job, jobset, step",
    [
        (WAITING, SUSPENDED, ""),
        (WAITING, None, ""),  # its supervisor finds out
        (TRAINING, RUNS, ""),
        (TRAINING, SUSPENDED, "pause"),
        (TRAINING, None, "stop"),
        (STOPPING, SUSPENDED, ""),
        (STOPPING, RUNS, ""),
        (PAUSED, SUSPENDED, ""),
        (PAUSED, RUNS, "resume"),
        (PAUSED, None, "forget"),
        (DONE, RUNS, ""),
        (DONE, SUSPENDED, ""),
        (DONE, None, ""),
    ],
)
def test_steps(job: WatchedJob, jobset: dict[str, dict[str, bool]] | None, step: Step) -> None:
    assert decide_step(job, jobset) == step


def test_only_what_runs_is_stopped_and_only_what_has_ended_resumes() -> None:
    for flags in itertools.product((False, True), repeat=4):
        job = WatchedJob(*flags)
        for jobset in (None, RUNS, SUSPENDED):
            step = decide_step(job, jobset)
            assert step not in ("stop", "pause") or job.is_running
            assert step != "resume" or (job.has_ended and not job.is_running and jobset is RUNS)
