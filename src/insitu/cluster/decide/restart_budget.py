"""Counts the failures of a job towards `--max-restarts`, and forgets those that it has outlived. Pure.

A failure is forgotten for each epoch that the job has come further since the last one, and for each hour in
which it came further at all: a long training isn't ended by rare failures, one that only fails is.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from insitu.cluster.decide.job_state import EpochStep, Failure, JobState

FORGOTTEN_AFTER = 3600.0
"""Seconds of training for which one failure is forgotten."""
MAX_FRUITLESS_RECONNECTIONS = 10
"""Reconnections in a row without a step in between, after which all tasks start again."""
_BEFORE_TRAINING: EpochStep = (-1, -1)
_FIRST_STEP: EpochStep = (0, 0)


def forget_outlived(state: JobState, progress: EpochStep | None, now: float) -> JobState:
    """Return `state` without the failures that the job has outlived by having come to `progress`."""
    last, here = state.failure_progress, progress or _BEFORE_TRAINING
    if not state.failures or last is None or here <= last:
        return state
    outlived = max(here[0] - max(last[0], 0), int((now - state.failure_at) // FORGOTTEN_AFTER))
    return replace(state, failures=max(0, state.failures - outlived))


def is_in_vain(state: JobState, failure: Failure | None) -> bool:
    """Return whether the job would fail in the same way again.

    So it is with a mistake before the first step is done: nothing has happened yet that it could come from.
    """
    if failure is None:
        return False
    reached = state.attempts[-1].progress if state.attempts else None
    return failure.final or (
        failure.mistake and not state.failures and (reached or _FIRST_STEP) <= _FIRST_STEP
    )


def count_failure(state: JobState, progress: EpochStep | None, now: float) -> JobState:
    """Return `state` with one failure more, at `progress`. The caller has made sure that it is allowed."""
    reached = max(progress or _BEFORE_TRAINING, state.failure_progress or _BEFORE_TRAINING)
    return replace(state, failures=state.failures + 1, failure_progress=reached, failure_at=now)


def count_fruitless_reconnections(state: JobState, progress: EpochStep | None) -> int:
    """Return how often tasks of this attempt reconnected without having trained a step since."""
    began = state.attempts[-1].started if state.attempts else 0.0
    here = progress or _BEFORE_TRAINING
    return sum(
        r.how == "reconnected" and r.at >= began and (r.steps or _BEFORE_TRAINING) >= here
        for r in state.recoveries
    )


def count_fruitless_attempts(state: JobState) -> int:
    """Count the attempts in a row, up to now, that came no further than the previous one."""
    reached = [a.progress or _BEFORE_TRAINING for a in reversed(state.attempts)]
    gains = (later > earlier for later, earlier in pairwise(reached))
    return next((number for number, gained in enumerate(gains) if gained), len(reached) - 1)
