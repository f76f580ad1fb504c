"""The decisions about a job, without processes: named cases, then random sequences of events."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from job_machine import (
    BUG,
    CHIEF,
    EVALUATOR,
    NODE,
    PEER_LOST,
    PS,
    W0,
    W1,
    W2,
    JobRun,
    logged,
    running,
    signals,
)

from insitu.base.spec import NodeId, TaskId
from insitu.cluster.decide import job as machine
from insitu.cluster.decide.events import (
    ControllerLostEvent,
    DataMovedEvent,
    Event,
    Finish,
    Launch,
    LaunchFailedEvent,
    LeaveEvent,
    MoveEvent,
    PeersLostEvent,
    Publish,
    ReadyEvent,
    RecoveredEvent,
    ResumedEvent,
    ScaleRequestedEvent,
    Signal,
    StalledEvent,
    StopRequestedEvent,
    SubmittedEvent,
    TakenOverEvent,
    TaskExitedEvent,
    TickEvent,
)
from insitu.cluster.decide.job_state import (
    ENDED,
    EVALUATOR_GRACE,
    Failure,
    JobState,
    OnLoss,
)


def test_a_job_whose_workers_end_well_is_finished() -> None:
    run = running(W0, W1)
    assert run.exits(W1) == []
    assert run.exits(W0)[-1] == Finish(0)
    assert (run.state.phase, run.state.exit_code) == ("finished", 0)


def test_a_killed_task_stops_the_rest_and_restarts_all() -> None:
    run = running(W0, W1)
    actions = run.exits(W1, -signal.SIGKILL)
    assert signals(actions) == [("worker:0", "term")]
    assert "worker:1 was killed by SIGKILL" in logged(actions)
    actions = run.exits(W0, -signal.SIGTERM)
    assert run.state.phase == "restarting" and "(1 of 3)" in logged(actions)
    actions = run.tick()
    assert actions[-2:] == [Publish(2), Launch((W0, W1))] and run.state.phase == "running"
    cause = run.state.attempts[0].cause
    assert cause is not None and cause.task == W1 and cause.code == 128 + signal.SIGKILL


def test_pauses_grow_up_to_a_limit_and_restarts_are_counted() -> None:
    run = running(W0, max_restarts=7)
    pauses = []
    for _ in range(7):
        run.exits(W0, -signal.SIGKILL)
        assert run.state.restart_at is not None
        pauses.append(run.state.restart_at - run.now)
        run.tick()
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    actions = run.exits(W0, -signal.SIGKILL)
    assert actions[-1] == Finish(137) and run.state.phase == "failed"
    assert "7 of 7 restarts were used" in run.state.reason


def test_a_task_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    run = running(W0, W1)
    run.exits(W1, 1)
    assert run.state.due == run.now + machine.TERM_GRACE
    assert signals(run.tick()) == [("worker:0", "kill")]
    assert run.state.due is None
    run.exits(W0, -signal.SIGKILL)
    cause = run.state.attempts[0].cause
    assert cause is not None and cause.task == W1


@pytest.mark.parametrize("first", [W0, W1])
def test_the_cause_is_who_died_and_not_who_lost_a_peer(first: TaskId) -> None:
    run = running(W0, W1)
    ends = {W0: (1, PEER_LOST), W1: (-signal.SIGKILL, None)}
    for task in (first, W1 if first == W0 else W0):
        run.exits(task, *ends[task])
    cause = run.state.attempts[0].cause
    assert cause is not None and cause.task == W1


def test_a_task_that_is_killed_while_it_is_asked_to_end_is_the_cause_of_a_lost_peer() -> None:
    run = running(W0, W1)
    run.exits(W0, 1, PEER_LOST)
    run.exits(W1, -signal.SIGTERM)
    cause = run.state.attempts[0].cause
    assert cause is not None and cause.task == W0  # nothing better is known: SIGTERM was ours


def test_the_same_traceback_without_progress_is_not_tried_again() -> None:
    run = running(W0)
    run.exits(W0, 1, BUG, progress=(2, 7))
    run.tick()
    actions = run.exits(W0, 1, BUG, progress=(2, 7))
    assert actions[-1] == Finish(1) and "same traceback twice" in run.state.reason


@pytest.mark.parametrize(
    ("message", "end"), [("Leave it out.", "Leave it out"), ("ignite://...", "ignite://...")]
)
def test_a_message_with_a_full_stop_does_not_end_the_sentence(message: str, end: str) -> None:
    run = running(W0)
    run.exits(W0, 1, Failure("InputError", message, "f00", final=True))
    assert f"InputError: {end}; it would" in run.state.reason


def test_the_same_exit_chosen_by_the_script_is_not_tried_again() -> None:
    run = running(W0)
    chosen = Failure("SystemExit", "", "3e7")
    assert "worker:0 ended with exit code 3: SystemExit" in logged(run.exits(W0, 3, chosen))
    run.tick()
    assert run.exits(W0, 3, chosen)[-1] == Finish(3)
    assert "SystemExit; the same exit twice" in run.state.reason


def test_a_mistake_before_the_first_step_is_told_once_for_all_tasks() -> None:
    run = running(W0, W1, W2)
    mistake = replace(BUG, mistake=True)
    assert logged(run.exits(W1, 1, mistake)) == "worker:1 ended with exit code 1: ValueError"
    run.exits(W0, 1, mistake)
    assert run.exits(W2, 1, mistake, progress=(0, 0))[-1] == Finish(1)
    assert run.state.reason.startswith("worker:1 and 2 others ended with exit code 1: ValueError: no; ")
    assert "it would end the same way again" in run.state.reason


@pytest.mark.parametrize("why", ["it has trained", "it has failed before"])
def test_what_looks_like_a_mistake_may_come_of_something_else_later(why: str) -> None:
    run = running(W0)
    if why == "it has failed before":
        run.exits(W0, -signal.SIGKILL)
        run.tick()
    run.exits(W0, 1, replace(BUG, mistake=True), progress=(0, 1) if why == "it has trained" else None)
    assert run.state.phase == "restarting"


@pytest.mark.parametrize(
    ("failure", "progress"), [(BUG, (2, 8)), (Failure("ValueError", "no", "other"), (2, 7)), (None, None)]
)
def test_progress_or_another_failure_earns_another_restart(
    failure: Failure | None, progress: tuple[int, int] | None
) -> None:
    run = running(W0)
    run.exits(W0, 1, BUG, progress=(2, 7))
    run.tick()
    run.exits(W0, 1, failure, progress=progress)
    assert run.state.phase == "restarting"


def test_losing_peers_again_and_again_is_no_bug() -> None:
    run = running(W0)
    run.exits(W0, 1, PEER_LOST)
    run.tick()
    run.exits(W0, 1, PEER_LOST)
    assert run.state.phase == "restarting"


def test_parameter_servers_are_stopped_when_training_has_ended() -> None:
    run = running(W0, W1, PS)
    assert run.exits(W0) == []
    assert signals(run.exits(W1)) == [("ps:0", "term")]
    assert run.exits(PS, -signal.SIGTERM)[-1] == Finish(0)


def test_workers_that_serve_a_chief_get_a_grace_once_it_has_ended() -> None:
    run = running(CHIEF, W0, W1, PS)
    assert signals(run.exits(CHIEF)) == []
    assert run.state.due == run.now + machine.WORKER_GRACE
    assert signals(run.tick()) == [("worker:0", "term"), ("worker:1", "term")]
    run.exits(W0, -signal.SIGTERM)
    assert signals(run.exits(W1, -signal.SIGTERM)) == [("ps:0", "term")]
    assert run.exits(PS, -signal.SIGTERM)[-1] == Finish(0)


def test_workers_that_still_train_are_waited_for_after_the_chief() -> None:
    run = running(CHIEF, W0)
    run.exits(CHIEF, reporting=(W0,))
    assert run.state.due is None
    assert run.exits(W0)[-1] == Finish(0)


def test_a_worker_that_fails_after_its_chief_has_ended_costs_nothing() -> None:
    run = running(CHIEF, W0)
    run.exits(CHIEF)
    assert "exit code 1" in logged(run.exits(W0, 1))
    assert run.state.exit_code == 0


def test_the_evaluator_may_finish_by_itself() -> None:
    run = running(W0, EVALUATOR)
    run.exits(W0)
    assert run.state.due == run.now + EVALUATOR_GRACE
    assert run.exits(EVALUATOR)[-1] == Finish(0)


def test_an_evaluator_that_does_not_end_is_stopped() -> None:
    run = running(W0, EVALUATOR)
    run.exits(W0)
    assert signals(run.tick()) == [("evaluator:0", "term")]
    assert run.exits(EVALUATOR, -signal.SIGTERM)[-1] == Finish(0)


def test_an_evaluator_that_fails_is_launched_again_and_then_given_up() -> None:
    run = running(W0, EVALUATOR)
    assert run.exits(EVALUATOR, 1, BUG)[-1] == Launch((EVALUATOR,))
    for delay in (1.0, 2.0):
        actions = run.exits(EVALUATOR, 1, BUG)
        assert run.state.due == run.now + delay and "training continues" in logged(actions)
        assert run.tick() == [Launch((EVALUATOR,))]
    assert "not started again: 3 of 3" in logged(run.exits(EVALUATOR, 1, BUG))
    assert run.state.due is None and run.state.phase == "running" and run.state.failures == 0
    assert run.exits(W0)[-1] == Finish(0)


def test_an_evaluator_that_ends_well_is_not_launched_again() -> None:
    run = running(W0, W1, EVALUATOR)
    # Worker 1 is about to be replaced: an evaluator is none of those that it needs.
    run.exits(W1, -9, elastic=(W0,), progress=(0, 1))
    run.exits(W1, -9, elastic=(W0,), progress=(0, 1))
    assert run.state.task(W1).launch_at is not None
    assert run.exits(EVALUATOR, 0) == []
    assert run.state.phase == "running" and not run.state.task(EVALUATOR).alive


def test_an_evaluator_that_cannot_be_started_does_not_stop_training() -> None:
    run = running(W0, EVALUATOR, max_restarts=1)
    actions = run.feed(LaunchFailedEvent((EVALUATOR,), "no memory"))
    assert "(1 of 1)" in logged(actions) and actions[-1] == Launch((EVALUATOR,))
    assert signals(run.feed(LaunchFailedEvent((EVALUATOR,), "no memory"))) == []
    assert run.exits(W0)[-1] == Finish(0)


def test_an_evaluator_that_failed_is_not_the_cause_of_what_follows() -> None:
    run = running(W0, EVALUATOR, max_restarts=0)
    run.exits(EVALUATOR, 3, BUG)
    run.exits(W0, 1, PEER_LOST)
    cause = run.state.attempts[0].cause
    assert cause is not None and cause.task == W0 and run.state.exit_code == 1


def test_an_evaluator_that_stands_still_is_killed_alone() -> None:
    run = running(W0, EVALUATOR)
    run.feed(StalledEvent("evaluator:0 stands still", (1, 2), (EVALUATOR,)))
    assert signals(run.tick()) == [("evaluator:0", "kill")]
    assert run.exits(EVALUATOR, -9)[-1] == Launch((EVALUATOR,)) and run.state.phase == "running"


def test_a_stall_dumps_stacks_before_anything_is_stopped() -> None:
    run = running(W0, W1, max_restarts=0)
    actions = run.feed(StalledEvent("no task made progress for 5 s", (1, 2)))
    assert signals(actions) == [("worker:0", "dump"), ("worker:1", "dump")]
    assert signals(run.tick()) == [("worker:0", "term"), ("worker:1", "term")]
    run.exits(W0, -signal.SIGTERM)
    assert run.exits(W1, -signal.SIGTERM)[-1] == Finish(machine.STALL_CODE)
    assert run.state.attempts[0].progress == (1, 2)


def test_a_stop_ends_the_job_and_a_second_one_kills() -> None:
    run = running(W0, PS)
    assert signals(run.feed(StopRequestedEvent())) == [("worker:0", "term"), ("ps:0", "term")]
    assert signals(run.feed(StopRequestedEvent())) == [("worker:0", "kill"), ("ps:0", "kill")]
    assert signals(run.feed(StopRequestedEvent())) == []
    run.exits(W0, -signal.SIGKILL)
    assert run.exits(PS, -signal.SIGKILL)[-1] == Finish(143)
    assert run.state.phase == "stopped"


def test_a_stop_while_a_restart_is_due_ends_the_job_at_once() -> None:
    run = running(W0)
    run.exits(W0, 1)
    assert run.feed(StopRequestedEvent())[-1] == Finish(143)


def test_a_stop_takes_the_place_of_a_restart_under_way() -> None:
    run = running(W0, W1)
    run.exits(W0, 1)
    run.feed(StopRequestedEvent())
    assert run.exits(W1, -signal.SIGTERM)[-1] == Finish(143)


def test_a_stop_does_not_undo_training_that_has_ended() -> None:
    run = running(CHIEF, W0)
    run.exits(CHIEF)
    assert signals(run.feed(StopRequestedEvent())) == [("worker:0", "term")]
    assert run.exits(W0, -signal.SIGTERM)[-1] == Finish(0)


def test_tasks_that_cannot_be_launched_fail_the_attempt() -> None:
    run = running(W0, W1, max_restarts=1)
    assert signals(run.feed(LaunchFailedEvent((W1,), "no memory"))) == [("worker:0", "term")]
    run.exits(W0, -signal.SIGTERM)
    assert run.state.phase == "restarting"
    run.tick()
    assert run.feed(LaunchFailedEvent((W0, W1), "no memory"))[-1] == Finish(1)
    assert "no memory" in run.state.reason


def test_a_lost_controller_fails_the_job() -> None:
    run = running(W0)
    assert run.feed(ControllerLostEvent())[-1] == Finish(1)
    assert "insitu resume" in run.state.reason


def test_events_of_an_ended_job_change_nothing() -> None:
    run = running(W0)
    run.exits(W0)
    before = run.state
    for event in (
        SubmittedEvent(),
        TaskExitedEvent(W0, 1),
        StopRequestedEvent(),
        StalledEvent("x"),
        TickEvent(),
        ControllerLostEvent(),
    ):
        assert run.feed(event) == []
    assert run.state == before


ALL = (CHIEF, W0, W1, PS, EVALUATOR)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: invariants hold, and the job can always be brought to an end."""

    @initialize(
        tasks=st.sets(st.sampled_from([CHIEF, W1, W2, PS, EVALUATOR])).filter(
            lambda tasks: W2 not in tasks or W1 in tasks
        ),
        max_restarts=st.integers(min_value=0, max_value=9),
        on_loss=st.sampled_from(["replace", "replace", "adopt", "restart"]),
    )
    def begin(self, tasks: set[TaskId], max_restarts: int, on_loss: OnLoss) -> None:
        self.run = JobRun(W0, *tasks, max_restarts=max_restarts, on_loss=on_loss)
        self.launches = self.finishes = self.tries = 0
        self.feed(SubmittedEvent())

    def feed(self, event: Event, after: float = 0.0) -> None:
        before = self.run.state
        actions = self.run.feed(event, after)
        self.check_evaluator(before, event)
        self.launches += sum(isinstance(a, Launch) for a in actions)
        # Tries that fail before anything runs, and what is asked for by hand, are no failures of a task.
        self.tries += isinstance(event, LaunchFailedEvent | ScaleRequestedEvent | TaskExitedEvent)
        self.finishes += sum(isinstance(a, Finish) for a in actions)
        alive = {t.task for t in self.run.state.alive}
        assert all(a.task in alive for a in actions if isinstance(a, Signal))

    def check_evaluator(self, before: JobState, event: Event) -> None:
        """While training is under way the evaluator's end touches nothing but itself."""
        exited = isinstance(event, TaskExitedEvent) and event.task == EVALUATOR
        unlaunched = isinstance(event, LaunchFailedEvent) and event.tasks == (EVALUATOR,)
        if before.phase != "running" or not (exited or unlaunched):
            return
        after = self.run.state
        assert after.phase == "running" or "finish" in (after.goal, after.phase[:6])
        assert (after.failures, after.bug, after.generation) == (
            before.failures,
            before.bug,
            before.generation,
        )
        assert len(after.attempts) == len(before.attempts)
        if after.phase == "running":
            assert [t for t in after.tasks if t.task != EVALUATOR] == [
                t for t in before.tasks if t.task != EVALUATOR
            ]

    @precondition(lambda self: self.run.state.alive)
    @rule(
        data=st.data(),
        code=st.sampled_from([0, 0, 1, -9, -15, -11]),
        failure=st.sampled_from([None, BUG, PEER_LOST]),
        progress=st.none() | st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
    )
    def a_task_ends(
        self, data: st.DataObject, code: int, failure: Failure | None, progress: tuple[int, int] | None
    ) -> None:
        alive = [t.task for t in self.run.state.alive]
        task = data.draw(st.sampled_from(alive))
        reporting = data.draw(st.sets(st.sampled_from(alive)))
        rigid = data.draw(st.sampled_from([set(), set(), set(alive[:1]), set(alive)]))
        elastic = tuple(sorted(set(alive) - {task} - rigid))
        lost = data.draw(st.sampled_from([(), (), (NODE,)]))
        self.feed(
            TaskExitedEvent(
                task,
                code,
                failure if code > 0 else None,
                progress,
                tuple(sorted(reporting - {task})),
                elastic,
                lost,
            )
        )

    @rule(
        event=st.sampled_from(
            [
                *(
                    StopRequestedEvent(),
                    StalledEvent("still"),
                    SubmittedEvent(),
                    TickEvent(),
                    TaskExitedEvent(PS, 1),
                ),
                *(TakenOverEvent(), RecoveredEvent(5), RecoveredEvent(1000), ResumedEvent()),
            ]
        )
    )
    def anything(self, event: Event) -> None:
        if isinstance(event, ResumedEvent) and self.run.state.phase in ENDED:
            self.finishes -= self.run.state.phase != "finished"
        if not isinstance(event, TaskExitedEvent) or event.task in [t.task for t in self.run.state.tasks]:
            self.feed(event)

    @precondition(lambda self: self.run.state.alive)
    @rule(elastic=st.booleans())
    def a_launch_fails(self, elastic: bool) -> None:
        alive = [t.task for t in self.run.state.alive]
        self.feed(LaunchFailedEvent((alive[-1],), "no", tuple(alive[:-1]) if elastic else ()))

    @precondition(lambda self: self.run.state.alive)
    @rule(
        data=st.data(),
        workers=st.integers(0, 4),
        kind=st.sampled_from([ReadyEvent, PeersLostEvent, StalledEvent, MoveEvent, LeaveEvent, 0, 0]),
    )
    def membership_changes(self, data: st.DataObject, workers: int, kind: Any) -> None:
        alive = tuple(t.task for t in self.run.state.alive)
        some = tuple(sorted(data.draw(st.sets(st.sampled_from(alive)))))
        if kind is ReadyEvent:
            self.feed(ReadyEvent(some, (0, 1)))
        elif kind is PeersLostEvent:
            self.feed(PeersLostEvent(some, (0, 1), alive))
        elif kind is StalledEvent:
            self.feed(StalledEvent("still", (0, 1), some, alive))
        elif kind is MoveEvent:
            self.feed(DataMovedEvent((), (NODE,) if workers % 2 else ()))
            node = NodeId(f"node-{workers}")
            self.tries += len(some)  # a move is no failure
            self.feed(MoveEvent(tuple((task, node) for task in some), "its data has moved", (0, 1), alive))
        elif kind is LeaveEvent:
            self.feed(LeaveEvent(NodeId(f"node-{workers}"), (0, 1)))
        else:
            self.feed(ScaleRequestedEvent(workers, "x", (0, 1), alive))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.feed(TickEvent(), seconds)

    @invariant()
    def launches_are_bounded_and_it_finishes_once(self) -> None:
        assert self.run.state.failures <= self.run.state.max_restarts
        assert self.launches <= len(self.run.state.attempts) + self.run.state.failures + self.tries
        assert self.finishes == (self.run.state.phase in ENDED)

    def teardown(self) -> None:
        """From any state, obedient tasks and a stop bring the end."""
        if not hasattr(self, "run"):
            return
        self.feed(StopRequestedEvent())
        for _ in range(40):
            if self.run.state.phase in ENDED:
                return
            asked = [t for t in self.run.state.alive if t.signal_sent]
            if asked:
                self.feed(TaskExitedEvent(asked[0].task, -signal.SIGKILL))
            elif self.run.state.due is not None:
                self.feed(TickEvent(), max(0.0, self.run.state.due - self.run.now))
        raise AssertionError(f"does not end: {self.run.state}")


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(st.lists(st.sampled_from([StopRequestedEvent(), TickEvent(), StalledEvent("x")]), max_size=8))
def test_the_same_events_give_the_same_states(events: list[Event]) -> None:
    first, second = running(W0, PS), running(W0, PS)
    for event in events:
        assert first.feed(event, 1.0) == second.feed(event, 1.0)
    assert first.state == second.state


def test_times_of_a_clock_that_was_set_back_are_bounded() -> None:
    """The next controller would have waited for as long as the clock was set back."""
    run = running(W0, W1)
    run.exits(W1, -9)
    run.exits(W0, -15)
    assert run.state.phase == "restarting" and run.state.restart_at is not None
    run.now -= 86_400.0
    run.feed(TakenOverEvent())
    assert run.state.restart_at == run.now + machine.LONGEST_DELAY
    run.feed(TickEvent(), machine.LONGEST_DELAY)
    assert run.state.phase == "running"
    # Also the times of single tasks: those that are to be killed, and those that are to be launched.
    run.feed(StopRequestedEvent())
    run.now -= 86_400.0
    run.feed(TakenOverEvent())
    assert {t.escalate_at for t in run.state.alive} == {run.now + machine.LONGEST_DELAY}


def test_times_that_are_right_stay() -> None:
    run = running(W0)
    run.feed(StopRequestedEvent())
    before = run.state
    run.feed(TakenOverEvent(), 1.0)
    assert run.state == before
