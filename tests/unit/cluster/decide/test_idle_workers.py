"""Workers that do nothing once the first has ended: who they are, when, and what becomes of the job."""

from __future__ import annotations

import signal

import pytest
from job_machine import CHIEF, EVALUATOR, PS, W0, W1, W2, logged, running, signals

from insitu.base.progress import Progress
from insitu.cluster.decide.events import Finish, LeftAloneEvent, TickEvent
from insitu.cluster.decide.idle_workers import IdleWatch, find_left_alone


def test_only_workers_that_never_report_are_left_alone_by_the_first() -> None:
    run = running(W0, W1, W2, PS)
    assert find_left_alone(run.state, {}) == ()
    run.exits(W0)
    assert find_left_alone(run.state, {W1: Progress(), W2: None}) == (W2,)
    other = running(W0, W1)
    other.exits(W1)
    assert find_left_alone(other.state, {}) == ()
    with_chief = running(CHIEF, W0, W1, PS)
    with_chief.exits(W0)
    assert find_left_alone(with_chief.state, {}) == ()


def test_a_task_is_quiet_while_it_neither_prints_nor_computes() -> None:
    watch = IdleWatch(100.0)
    assert watch.observe({W1: 5.0}, 10, 0.0) == ()
    assert watch.observe({W1: 5.9}, 10, 50.0) == ()
    assert watch.observe({W1: 6.9}, 10, 99.0) == ()  # two percent of a processor is what libraries use
    assert watch.observe({W1: 6.9}, 10, 100.0) == (W1,)
    assert watch.observe({W1: 6.9}, 11, 101.0) == ()
    assert watch.observe({W1: 9.9}, 11, 150.0) == ()
    assert watch.observe({W1: 9.9}, 11, 249.0) == ()
    assert watch.observe({W1: 9.9}, 11, 250.0) == (W1,)


def test_nobody_is_quiet_while_another_works_and_who_ends_is_forgotten() -> None:
    watch = IdleWatch(10.0)
    watch.observe({W1: 0.0, W2: 0.0}, 0, 0.0)
    assert watch.observe({W1: 0.0, W2: 9.0}, 0, 10.0) == ()
    assert watch.observe({W1: 0.0}, 0, 11.0) == (W1,)
    assert watch.observe({}, 0, 12.0) == ()
    assert watch.observe({W1: 0.0}, 0, 13.0) == ()


def test_with_servers_the_first_workers_end_is_that_of_the_job() -> None:
    run = running(W0, W1, PS, EVALUATOR)
    run.exits(W0)
    actions = run.feed(LeftAloneEvent((W1,), 600.0))
    assert signals(actions) == [("worker:1", "term"), ("ps:0", "term")]
    assert "worker:1 neither printed nor computed for 600 s after worker:0 had ended" in logged(actions)
    run.exits(PS, -signal.SIGTERM)
    assert run.feed(TickEvent(), after=11.0)  # SIGKILL for a worker that doesn't listen
    run.exits(W1, -signal.SIGKILL)
    assert run.state.phase == "stopping"  # the evaluator may end by itself
    assert run.exits(EVALUATOR)[-1] == Finish(0)
    assert run.state.phase == "finished"


@pytest.mark.parametrize("code", [-signal.SIGTERM, 0])
def test_without_servers_they_have_failed_for_good(code: int) -> None:
    run = running(W0, W1, max_restarts=3)
    run.exits(W0)
    actions = run.feed(LeftAloneEvent((W1,), 600.0))
    assert signals(actions) == [("worker:1", "dump")]
    assert signals(run.tick()) == [("worker:1", "term")]
    assert run.exits(W1, code)[-1] == Finish(124)
    assert (run.state.phase, run.state.exit_code, len(run.state.attempts)) == ("failed", 124, 1)
    assert "worker:1 neither printed nor computed for 600 s after worker:0 had ended" in run.state.reason
    assert "not tried again" in run.state.reason


@pytest.mark.parametrize("ended", [True, False])
def test_it_changes_nothing_while_the_job_ends(ended: bool) -> None:
    run = running(W0, W1, PS)
    run.exits(W0)
    run.exits(W1)
    if ended:
        run.exits(PS, -signal.SIGTERM)
    before = run.state
    assert run.feed(LeftAloneEvent((W1,), 600.0)) == [] and run.state == before
