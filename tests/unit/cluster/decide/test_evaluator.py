"""The evaluator scores the last checkpoint, whatever happens to it, and holds nobody up for longer than it
may."""

from __future__ import annotations

import signal

from hypothesis import given, settings
from hypothesis import strategies as st
from job_machine import BUG, EVALUATOR, PS, W0, W1, logged, running, signals

from insitu.cluster.decide.events import (
    Finish,
    Launch,
    LaunchFailedEvent,
    LeftAloneEvent,
    Publish,
    StopRequestedEvent,
)
from insitu.cluster.decide.job_state import EVALUATOR_GRACE


def test_the_roster_tells_the_evaluator_that_training_is_over() -> None:
    run = running(W0, W1, EVALUATOR)
    assert not [a for a in run.exits(W0) if isinstance(a, Publish) and run.state.goal == "finish"]
    generation = run.state.generation
    assert Publish(generation + 1) in run.exits(W1)
    assert (run.state.phase, run.state.goal) == ("stopping", "finish")
    assert run.exits(EVALUATOR)[-1] == Finish(0)


def test_nobody_is_told_where_there_is_no_evaluator() -> None:
    for tasks in ((W0,), (W0, PS)):
        run = running(*tasks)
        assert not [a for a in run.exits(W0) if isinstance(a, Publish)]
    run = running(W0, EVALUATOR)
    run.exits(EVALUATOR)
    assert run.exits(W0)[-1] == Finish(0)


def test_an_evaluator_that_fails_over_the_last_checkpoint_is_launched_again() -> None:
    run = running(W0, EVALUATOR, max_restarts=2)
    run.exits(W0)
    actions = run.exits(EVALUATOR, -9)
    assert actions[-1] == Launch((EVALUATOR,)) and "training is over" in logged(actions)
    assert run.state.due == run.now + EVALUATOR_GRACE  # it has its grace again
    run.exits(EVALUATOR, 1, BUG)
    assert run.tick() == [Launch((EVALUATOR,))]
    assert run.state.due == run.now + EVALUATOR_GRACE
    actions = run.exits(EVALUATOR, 1, BUG)
    assert "not started again: 2 of 2" in logged(actions) and actions[-1] == Finish(0)


def test_an_evaluator_that_waits_for_its_launch_when_training_ends_is_launched() -> None:
    run = running(W0, EVALUATOR)
    run.exits(EVALUATOR, 1, BUG)
    run.exits(EVALUATOR, 1, BUG)
    launch_at = run.state.task(EVALUATOR).launch_at
    assert launch_at is not None and Publish(2) in run.exits(W0)
    assert run.state.due == launch_at and run.state.phase == "stopping"
    assert run.tick() == [Launch((EVALUATOR,))]
    assert run.exits(EVALUATOR)[-1] == Finish(0)


def test_an_evaluator_that_could_not_be_started_for_the_last_checkpoint_is_tried_again() -> None:
    run = running(W0, EVALUATOR)
    run.exits(W0)
    run.exits(EVALUATOR, -9)
    assert run.feed(LaunchFailedEvent((EVALUATOR,), "no memory"))[-1] != Finish(0)
    assert run.tick() == [Launch((EVALUATOR,))]


def test_an_evaluator_beyond_its_grace_is_stopped_and_not_launched_again() -> None:
    run = running(W0, EVALUATOR)
    run.exits(W0)
    assert signals(run.tick()) == [("evaluator:0", "term")]
    assert run.exits(EVALUATOR, -signal.SIGTERM)[-1] == Finish(0)


def test_a_stop_ends_what_waits_for_the_last_score() -> None:
    run = running(W0, EVALUATOR)
    run.exits(EVALUATOR, 1, BUG)
    run.exits(EVALUATOR, 1, BUG)
    run.exits(W0)
    assert run.feed(StopRequestedEvent())[-1] == Finish(0)
    run = running(W0, EVALUATOR)
    run.exits(W0)
    assert signals(run.feed(StopRequestedEvent())) == [("evaluator:0", "term")]
    assert run.exits(EVALUATOR, -signal.SIGTERM)[-1] == Finish(0)


def test_the_end_of_a_chief_that_others_were_left_by_is_told_as_well() -> None:
    run = running(W0, W1, PS, EVALUATOR)
    run.exits(W0)
    assert Publish(2) in run.feed(LeftAloneEvent((W1,), 5.0))
    assert run.state.goal == "finish"


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0, 1, -9]), max_size=8), st.integers(0, 3))
def test_the_job_ends_well_whatever_the_evaluator_does(codes: list[int], max_restarts: int) -> None:
    run = running(W0, EVALUATOR, max_restarts=max_restarts)
    run.exits(W0)
    for code in codes:
        if run.state.phase == "finished":
            break
        while not run.state.task(EVALUATOR).alive:
            run.tick()
        run.exits(EVALUATOR, code)
    while run.state.phase != "finished":
        run.tick()
        task = run.state.task(EVALUATOR)
        if task.alive and task.signal_sent:
            run.exits(EVALUATOR, -signal.SIGTERM)
    assert run.state.exit_code == 0 and run.state.failures == 0
