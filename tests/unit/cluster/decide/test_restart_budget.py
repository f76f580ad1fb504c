"""Which failures count towards --max-restarts."""

from __future__ import annotations

import signal

import pytest
from job_machine import W0, W1, running, signals

from insitu.cluster.decide.events import Finish, PeersLostEvent, Publish, RecoveredEvent
from insitu.cluster.decide.restart_budget import FORGOTTEN_AFTER, MAX_FRUITLESS_RECONNECTIONS

KILLED = -signal.SIGKILL


def test_blips_of_the_network_never_end_a_job() -> None:
    """The fourth one in a job's life did."""
    run = running(W0, W1, max_restarts=0)
    for step in range(100):
        actions = run.feed(PeersLostEvent((W0, W1), (0, step), (W0, W1)), 5.0)
        assert actions[-1] == Publish(step + 2) and run.state.failures == 0
        run.feed(RecoveredEvent(step + 2))


def test_a_connection_that_never_holds_restarts_all() -> None:
    run = running(W0, W1)
    for _ in range(MAX_FRUITLESS_RECONNECTIONS):
        assert isinstance(run.feed(PeersLostEvent((W0, W1), (1, 5), (W0, W1)), 5.0)[-1], Publish)
    actions = run.feed(PeersLostEvent((W0, W1), (1, 5), (W0, W1)), 5.0)
    assert signals(actions) == [("worker:0", "term"), ("worker:1", "term")]
    for task in (W0, W1):
        run.exits(task, -signal.SIGTERM)
    assert run.state.failures == 1
    run.tick()
    # The next attempt begins with none.
    assert isinstance(run.feed(PeersLostEvent((W0, W1), (1, 2), (W0, W1)), 5.0)[-1], Publish)


def test_a_step_in_between_counts_anew() -> None:
    run = running(W0, W1)
    for step in range(3 * MAX_FRUITLESS_RECONNECTIONS):
        at = (1, step // (MAX_FRUITLESS_RECONNECTIONS - 1))
        assert isinstance(run.feed(PeersLostEvent((W0,), at, (W0, W1)), 5.0)[-1], Publish)


@pytest.mark.parametrize("by", ["epochs", "hours"])
def test_a_job_that_comes_further_outlives_its_failures(by: str) -> None:
    run = running(W0, W1, max_restarts=2)
    for number in range(50):
        at = (number, 5) if by == "epochs" else (0, number)
        run.exits(W1, KILLED, elastic=(W0,), progress=at)
        assert run.state.phase == "running", f"ended at failure {number + 1}"
        run.now += 1.0 if by == "epochs" else FORGOTTEN_AFTER
    assert run.state.failures == 1 and len(run.state.attempts) == 1


@pytest.mark.parametrize("at", [(1, 5), (1, 6)])
def test_a_job_that_hardly_comes_further_is_ended(at: tuple[int, int]) -> None:
    run = running(W0, W1, max_restarts=2)
    for number in range(3):
        run.exits(W1, KILLED, elastic=(W0,), progress=(at[0], at[1] * number))
        if run.state.task(W1).launch_at is not None:
            run.tick()
    run.exits(W0, -signal.SIGTERM)
    assert run.state.phase == "failed" and "2 of 2 restarts were used" in run.state.reason


def test_time_alone_forgives_nothing() -> None:
    run = running(W0, W1, max_restarts=1)
    run.exits(W1, KILLED, elastic=(W0,), progress=(1, 5))
    run.now += 100 * FORGOTTEN_AFTER
    actions = run.exits(W1, KILLED, elastic=(W0,), progress=(1, 5))
    assert signals(actions) == [("worker:0", "term")]
    assert Finish(137) in run.exits(W0, -signal.SIGTERM)


def test_restarts_of_all_are_outlived_too() -> None:
    run = running(W0, max_restarts=1)
    for epoch in range(10):
        run.exits(W0, KILLED, progress=(epoch, 3))
        assert run.state.phase == "restarting", f"ended at failure {epoch + 1}"
        run.tick()
    run.exits(W0, KILLED, progress=(9, 3))
    assert run.state.phase == "failed"
