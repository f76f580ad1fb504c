"""How a recovery goes, from the tasks' records."""

from __future__ import annotations

from dataclasses import replace

from job_machine import W0, W1, W2, running

from insitu.base.progress import IDLE, LEAVING, Progress
from insitu.base.roster import CONNECTING, JOINING, RECOVERING
from insitu.cluster.decide.job_state import JobState
from insitu.cluster.decide.recovery_progress import (
    find_disconnected,
    find_furthest,
    find_ready_to_join,
    find_waiting_for_ended,
    has_recovered,
)


def replaced() -> JobState:
    """Worker 1 was replaced at epoch 1, step 5: the roster of generation 2 names its successor."""
    run = running(W0, W1)
    run.exits(W1, -9, elastic=(W0,), progress=(1, 5))
    assert run.state.generation == 2
    return run.state


def test_the_furthest_record_counts() -> None:
    assert find_furthest({W0: Progress(1, 2), W1: Progress(1, 9), W2: None}) == (1, 9)
    assert find_furthest({W0: None}) is None


def test_a_recovery_ends_once_every_member_has_completed_a_step_in_the_new_generation() -> None:
    state = replaced()
    after = Progress(1, 6, generation=2)
    assert has_recovered(state, {W0: after, W1: after})
    assert has_recovered(state, {W0: after, W1: Progress(1, 5, place=IDLE, generation=2)})
    for behind in (None, Progress(1, 5, generation=2), Progress(1, 6, generation=1)):
        assert not has_recovered(state, {W0: after, W1: behind})
    ended = state.with_task(replace(state.task(W1), alive=False, code=0))
    assert has_recovered(ended, {W0: after})
    assert not has_recovered(ended.with_task(replace(ended.task(W1), code=-9)), {W0: after})


def test_newcomers_are_ready_once_they_wait_for_a_roster() -> None:
    state = replaced()
    new = state.with_task(replace(state.task(W1), member=False, shards=()))
    assert find_ready_to_join(new, {W1: Progress(place=JOINING)}) == (W1,)
    assert find_ready_to_join(new, {W1: Progress(place="gradient")}) == ()
    assert find_ready_to_join(state, {W1: Progress(place=JOINING)}) == ()


def test_members_are_disconnected_in_the_newest_generation_only() -> None:
    state = replaced()
    lost = Progress(1, 6, place=RECOVERING, generation=2)
    assert find_disconnected(state, {W0: lost, W1: None}) == (W0,)
    assert find_disconnected(state, {W0: replace(lost, generation=1)}) == ()
    # The death of a member explains it.
    dead = state.with_task(replace(state.task(W1), alive=False, launch_at=5.0))
    assert find_disconnected(dead, {W0: lost}) == ()


def test_who_waits_for_a_task_that_has_ended_well_is_found() -> None:
    run = running(W0, W1, W2)
    waits = {W0: Progress(place=RECOVERING), W1: None, W2: Progress(place=CONNECTING)}
    assert find_waiting_for_ended(run.state, waits) == ()
    run.exits(W1)
    assert find_waiting_for_ended(run.state, waits) == (W0, W2)
    assert find_waiting_for_ended(run.state, {W0: Progress(place=IDLE), W2: None}) == ()


def test_a_task_that_leaves_explains_a_lost_connection() -> None:
    state = running(W0, W1).state
    lost = Progress(1, 5, place=RECOVERING, generation=state.generation)
    assert find_disconnected(state, {W0: lost, W1: None}) == (W0,)
    assert find_disconnected(state, {W0: lost, W1: Progress(place=LEAVING)}) == ()
