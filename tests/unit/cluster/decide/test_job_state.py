"""The state of a job by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_machine import PS, W0, W1, running

from insitu.cluster.decide.job_state import JobState, validate


def test_progress_never_goes_back() -> None:
    state = running(W0).state
    assert state.with_progress(None) is state
    further = state.with_progress((1, 2))
    assert further.attempts[-1].progress == (1, 2)
    assert further.with_progress((0, 9)).attempts[-1].progress == (1, 2)
    assert JobState(0, ()).with_progress((1, 2)).attempts == ()


def test_the_next_tick_is_due_at_the_earliest_of_all_times() -> None:
    state = running(W0, W1).state
    assert state.due is None
    state = state.with_task(replace(state.task(W0), escalate_at=9.0))
    assert state.due == 9.0
    state = state.with_task(replace(state.task(W1), alive=False, launch_at=7.0))
    assert state.due == 7.0
    assert replace(state, restart_at=3.0).due == 3.0


def test_members_are_the_workers_that_the_roster_names() -> None:
    state = running(W0, W1, PS).state
    assert [t.task for t in state.members] == [W0, W1] and state.has_servers
    assert [t.task for t in state.with_task(replace(state.task(W0), member=False)).members] == [W1]


def test_a_broken_invariant_is_named() -> None:
    state = running(W0).state
    validate(state)
    with pytest.raises(ValueError, match="a running task has no exit code"):
        validate(state.with_task(replace(state.task(W0), code=0)))
