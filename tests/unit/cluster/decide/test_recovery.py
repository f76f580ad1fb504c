"""What becomes of one task while the others continue, without processes."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from job_machine import (
    BUG,
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
from insitu.cluster.decide import recovery
from insitu.cluster.decide.events import (
    Action,
    ControllerLostEvent,
    Finish,
    Launch,
    LaunchFailedEvent,
    PeersLostEvent,
    Publish,
    ReadyEvent,
    RecoveredEvent,
    ResumedEvent,
    ScaleRequestedEvent,
    StalledEvent,
    SubmittedEvent,
    TickEvent,
)

KILLED = -signal.SIGKILL
PS1 = TaskId("ps", 1)


def dies(run: JobRun, task: TaskId, code: int = KILLED, failure: Any = None, **more: Any) -> list[Action]:
    """`task` ends while all others say that they are elastic."""
    elastic = tuple(t.task for t in run.state.alive if t.task != task)
    return run.exits(task, code, failure, **{"elastic": elastic, "progress": (1, 5), **more})


def shards(run: JobRun) -> dict[str, tuple[int, ...]]:
    return {str(t.task): t.shards for t in run.state.members}


def three(**options: Any) -> JobRun:
    return running(W0, W1, W2, **options)


@pytest.mark.parametrize("task", [W0, W1])
def test_a_killed_worker_is_replaced_alone_also_the_chief(task: TaskId) -> None:
    run = running(W0, W1)
    actions = dies(run, task)
    assert actions[-2:] == [Publish(2), Launch((task,))] and signals(actions) == []
    assert run.state.task(task).incarnation == 2 and run.state.phase == "running"
    assert len(run.state.attempts) == 1 and run.state.failures == 1
    assert run.feed(RecoveredEvent(2), 0.7)
    assert run.state.recoveries[0].ended == (first := run.now)
    assert not run.feed(RecoveredEvent(2), 5.0) and run.state.recoveries[0].ended == first
    for one, other in ((W0, W1), (W1, W0)):
        run.exits(one, elastic=(other,))
    assert run.state.phase == "finished"


def test_two_deaths_at_once_and_all_but_one() -> None:
    run = three()
    assert dies(run, W0)[-2:] == [Publish(2), Launch((W0,))]
    assert run.exits(W2, KILLED, elastic=(W1,), progress=(1, 5))[-2:] == [Publish(3), Launch((W2,))]
    assert run.feed(RecoveredEvent(3))
    assert all(r.ended is not None for r in run.state.recoveries)


def test_a_death_during_recovery_gives_the_next_generation() -> None:
    run = running(W0, W1)
    dies(run, W1)
    actions = run.exits(W1, KILLED, elastic=(W0,), progress=(1, 5))
    assert run.state.due == run.now + 1.0 and Publish(3) not in actions  # it died before it came anywhere
    assert run.tick()[-2:] == [Publish(3), Launch((W1,))]


def test_when_nobody_with_the_state_is_left_all_start_again() -> None:
    run = running(W0, W1)
    dies(run, W1)
    actions = run.exits(W0, KILLED, elastic=(), progress=(1, 5))
    assert signals(actions) == [("worker:1", "term")]
    run.exits(W1, -signal.SIGTERM)
    assert run.state.phase == "restarting"
    actions = run.tick()
    assert actions[-2:] == [Publish(3), Launch((W0, W1))]
    assert [t.incarnation for t in run.state.tasks] == [2, 3]


@pytest.mark.parametrize("why", ["rigid", "restart", "ended well"])
def test_all_start_again_where_the_others_cannot_go_on(why: str) -> None:
    run = three(on_loss="restart" if why == "restart" else "replace")
    if why == "ended well":
        run.exits(W2)
    rigid = (W0,) if why == "rigid" else (W0, W2)
    assert signals(run.exits(W1, KILLED, elastic=rigid))[0] == ("worker:0", "term")


def test_the_same_bug_of_a_replacement_ends_the_job() -> None:
    run = running(W0, W1)
    dies(run, W1, 1, BUG, progress=(1, 5))
    actions = dies(run, W1, 1, BUG, progress=(1, 5))
    assert signals(actions) == [("worker:0", "term")]
    assert run.exits(W0, -signal.SIGTERM)[-1] == Finish(1)
    assert "same traceback twice" in run.state.reason


def test_the_same_bug_in_two_tasks_at_once_is_one_that_may_pass() -> None:
    run = three()
    run.now += 1
    dies(run, W1, 1, BUG)
    assert dies(run, W2, 1, BUG)[-1] == Launch((W2,))


def test_losing_a_peer_while_joining_is_no_bug() -> None:
    run = running(W0, W1)
    for _ in range(3):
        dies(run, W1, 1, PEER_LOST)
        if run.state.due is not None:
            run.tick()
    assert run.state.phase == "running" and run.state.failures == 3
    dies(run, W1, 1, PEER_LOST)
    assert "3 of 3" in logged(run.exits(W0, -signal.SIGTERM))


def test_a_task_that_dies_again_and_again_waits_longer_each_time() -> None:
    run = running(W0, W1, max_restarts=9)
    pauses = []
    for _ in range(6):
        dies(run, W1)
        pauses.append((run.state.due or run.now) - run.now)
        if run.state.due is not None:
            run.tick()
    assert pauses == [0, 1, 2, 4, 8, 16]
    dies(run, W1, progress=(1, 6))
    assert run.state.due is None


def test_a_peer_that_ends_well_before_the_replacement_came_back_means_all_start_again() -> None:
    run = running(W0, W1)
    dies(run, W1)
    assert signals(run.exits(W0, 0, elastic=())) == [("worker:1", "term")]
    assert "had not come back" in logged(run.exits(W1, -signal.SIGTERM))


def test_a_peer_whose_state_a_replacement_needs_ends_and_all_start_again() -> None:
    run = running(W0, W1)
    dies(run, W1)
    assert signals(run.exits(W0, 0, recovering=(W1,))) == [("worker:1", "term")]


def test_an_evaluator_costs_nobody_anything() -> None:
    run = running(W0, W1, EVALUATOR)
    assert run.exits(EVALUATOR, 1, elastic=())[-1] == Launch((EVALUATOR,))
    assert run.state.generation == 1


def test_a_parameter_server_is_replaced_where_another_mirrors_it() -> None:
    run = running(W0, W1, PS, PS1, mirrored=True)
    assert dies(run, PS)[-2:] == [Publish(2), Launch((PS,))]
    assert [str(t.task) for t in run.state.tasks if t.incarnation == 2] == ["ps:0"]
    # The other one dies before it is back: nobody has what both held.
    run = running(W0, W1, PS, PS1, mirrored=True)
    run.state = run.state.with_task(replace(run.state.task(PS1), alive=False, code=KILLED))
    assert signals(dies(run, PS)) == [("worker:0", "term"), ("worker:1", "term")]
    assert signals(dies(running(W0, W1, PS, PS1), PS)) != []


def test_workers_with_servers_need_no_other_worker() -> None:
    run = running(W0, W1, PS, on_loss="adopt")
    run.exits(W1, elastic=(W0,))
    # Nobody has to be there to continue with, and nobody adopts shards that servers count by worker.
    actions = run.exits(W0, KILLED, elastic=(), progress=(1, 5))
    assert signals(actions) != []
    run = running(W0, W1, PS, on_loss="adopt")
    actions = run.exits(W0, KILLED, elastic=(W1,), progress=(1, 5))
    assert actions[-2:] == [Publish(2), Launch((W0,))] and "the others continue" in logged(actions)
    assert shards(run) == {"worker:0": (0,), "worker:1": (1,)}
    assert run.exits(W1, 0, elastic=()) == []
    assert run.exits(W0, KILLED, elastic=(), progress=(1, 6))
    assert "count on the workers" in logged(running(W0, W1, PS).feed(ScaleRequestedEvent(1, "t")))


def test_adoption_and_the_way_back() -> None:
    run = three(on_loss="adopt")
    actions = dies(run, W1)
    assert actions[-2:] == [Publish(2), Launch((W1,))]
    assert shards(run) == {"worker:0": (0, 1), "worker:2": (2,)}
    assert run.feed(ReadyEvent((W1,)))[-1] == Publish(3)
    assert sorted(s for held in shards(run).values() for s in held) == [0, 1, 2]
    assert [r.how for r in run.state.recoveries] == ["adopted", "joined"]
    assert run.feed(ReadyEvent((W1,))) == []


def test_the_shards_of_the_chief_are_not_adopted() -> None:
    run = three(on_loss="adopt")
    actions = dies(run, W0)
    assert actions[-2:] == [Publish(2), Launch((W0,))] and "the others wait" in logged(actions)
    assert shards(run) == {"worker:0": (0,), "worker:1": (1,), "worker:2": (2,)}
    dies(run, W1)
    assert [r.how for r in run.state.recoveries] == ["replaced", "adopted"]
    # Where it can't be started, the others wait for it.
    run = running(W0, W1)
    dies(run, W0)
    assert run.feed(LaunchFailedEvent((W0,), "no memory", (W1,)))
    assert shards(run) == {"worker:0": (0,), "worker:1": (1,)} and run.state.phase == "running"
    assert Launch((W0,)) in run.tick()


def test_a_newcomer_that_dies_costs_the_others_nothing() -> None:
    run = three(on_loss="adopt")
    dies(run, W1)
    assert not [a for a in dies(run, W1) if isinstance(a, Publish)]
    assert run.tick()[-1] == Launch((W1,))


def test_a_replacement_that_cannot_be_started_is_adopted_from_and_tried_again() -> None:
    run = running(W0, W1)
    dies(run, W1)
    actions = run.feed(LaunchFailedEvent((W1,), "no memory", (W0,)))
    assert actions[-1] == Publish(3) and shards(run) == {"worker:0": (0, 1)}
    assert run.state.phase == "running" and run.tick() == [Launch((W1,))]
    assert run.feed(ReadyEvent((W1,)))[-1] == Publish(4)


def test_a_replacement_goes_where_a_backup_is_once_its_node_is_gone() -> None:
    other = NodeId("node-1")
    run = running(W0, W1)
    run.state = machine.replace(run.state, holders=((NODE, other), (NODE, other)))
    dies(run, W1, lost=(NODE,))
    assert run.state.task(W1).node == other


def test_peers_that_lost_their_connection_meet_again() -> None:
    run = running(W0, W1)
    actions = run.feed(PeersLostEvent((W0, W1), (1, 5), (W0, W1)))
    assert actions[-1] == Publish(2) and run.state.failures == 0
    actions = run.feed(PeersLostEvent((W0,), (1, 5), (W0,)))
    assert signals(actions) == [("worker:0", "term"), ("worker:1", "term")]


def test_a_stuck_task_is_killed_and_replaced_after_its_stacks_were_dumped() -> None:
    run = running(W0, W1)
    actions = run.feed(StalledEvent("worker:1 stands still", (1, 5), (W1,), (W0, W1)))
    assert signals(actions) == [("worker:0", "dump"), ("worker:1", "dump")]
    assert run.feed(StalledEvent("again", (1, 5), (W1,), (W0, W1))) == []
    assert signals(run.tick()) == [("worker:1", "kill")]
    assert dies(run, W1)[-2:] == [Publish(2), Launch((W1,))]
    assert run.state.recoveries[0].text == "worker:1 stands still"


def test_growing_and_shrinking_by_hand() -> None:
    run = three()
    everybody = (W0, W1, W2)
    actions = run.feed(ScaleRequestedEvent(1, "x", (1, 5), everybody))
    assert actions[-1] == Publish(2) and shards(run) == {"worker:0": (0, 1, 2)}
    assert run.exits(W1) == [] and run.exits(W2, 1) != []
    assert run.state.phase == "running"
    actions = run.feed(ScaleRequestedEvent(3, "y", (1, 6), (W0,)))
    assert actions[-1] == Launch((W1, W2)) and run.state.generation == 2
    run.feed(ReadyEvent((W2,)))
    assert run.feed(ReadyEvent((W1,)))[-1] == Publish(4)
    assert sorted(map(len, shards(run).values())) == [1, 1, 1]
    for task in everybody:
        run.exits(task, elastic=everybody)
    assert run.state.phase == "finished"


def test_a_released_task_that_does_not_end_is_made_to() -> None:
    run = running(W0, W1)
    run.feed(ScaleRequestedEvent(1, "x", (1, 5), (W0, W1)))
    assert run.state.due == run.now + recovery.RELEASE_GRACE
    assert signals(run.tick()) == [("worker:1", "term")]
    run.exits(W1, -signal.SIGTERM)
    assert run.exits(W0)[-1] == Finish(0)


@pytest.mark.parametrize(("workers", "elastic"), [(0, (W0, W1)), (3, (W0, W1)), (1, (W0,))])
def test_what_cannot_be_scaled_is_told(workers: int, elastic: tuple[TaskId, ...]) -> None:
    run = running(W0, W1)
    before = run.state
    assert "not scaled" in logged(run.feed(ScaleRequestedEvent(workers, "x", None, elastic)))
    assert run.state == before


def test_a_job_does_not_shrink_to_those_that_lack_the_state_of_the_training() -> None:
    run = running(W0, W1)
    dies(run, W0)
    assert "not scaled" in logged(run.feed(ScaleRequestedEvent(1, "x", (1, 5), (W1,))))
    assert shards(run) == {"worker:0": (0,), "worker:1": (1,)}
    assert run.feed(ScaleRequestedEvent(1, "y", (1, 6), (W0, W1)))[-1] == Publish(3)
    run = three(on_loss="adopt")
    dies(run, W1)
    assert shards(run) == {"worker:0": (0, 1), "worker:2": (2,)}
    assert "not scaled" in logged(run.feed(ScaleRequestedEvent(1, "x", (1, 5), (W2,))))
    assert not run.state.task(W2).released


def test_scaling_lasts_through_a_restart_of_all() -> None:
    run = three()
    run.feed(ScaleRequestedEvent(2, "x", (1, 5), (W0, W1, W2)))
    run.exits(W2)
    run.exits(W1, KILLED)
    run.exits(W0, -signal.SIGTERM)
    assert run.tick()[-1] == Launch((W0, W1))
    assert shards(run) == {"worker:0": (0,), "worker:1": (1, 2)}


def test_a_failed_job_goes_on_when_it_is_resumed_and_a_finished_one_does_not() -> None:
    run = running(W0, max_restarts=0)
    run.exits(W0, KILLED)
    assert run.state.phase == "failed"
    assert run.feed(ResumedEvent()) == []
    assert (run.state.phase, run.state.exit_code, run.state.reason) == ("pending", None, "")
    assert run.state.task(W0).code is None  # that of the attempt before would be shown
    assert run.feed(SubmittedEvent())[-2:] == [Publish(2), Launch((W0,))]
    run.exits(W0)
    assert run.feed(ResumedEvent()) == [] and run.state.phase == "finished"


def test_no_checkpoint_is_claimed_that_is_not_there() -> None:
    for has_checkpoint, said in (
        (True, "(resumed)"),
        (False, "(resumed; the job's folder has no checkpoint: "),
    ):
        run = running(W0, max_restarts=0)
        run.exits(W0, KILLED)
        run.feed(ResumedEvent())
        actions = run.feed(SubmittedEvent(has_checkpoint=has_checkpoint))
        assert f"attempt 2 starts {said}" in logged(actions)


def test_a_job_that_ends_before_it_goes_on_can_be_resumed_again() -> None:
    run = running(W0, max_restarts=0)
    run.exits(W0, KILLED)
    run.feed(ResumedEvent())
    run.feed(ControllerLostEvent("no process"))
    assert (run.state.phase, run.state.reason) == ("failed", "no process")
    run.feed(ResumedEvent())
    assert run.feed(SubmittedEvent())[-1] == Launch((W0,))


def test_a_job_that_is_resumed_starts_where_nodes_can_be_reached_at_the_first_try() -> None:
    """As after a take-over, whose reason is that a node is lost. Those that were lost before may be back."""
    run, other = running(W0, W1, max_restarts=0), NodeId("other")
    run.state = replace(run.state, holders=((NODE, other), (other, NODE)), lost_nodes=(other,))
    run.exits(W0, KILLED)
    run.exits(W1, KILLED)
    assert run.state.phase == "failed"
    run.feed(ResumedEvent())
    assert run.feed(SubmittedEvent((NODE,)))[-1] == Launch((W0, W1))
    assert [task.node for task in run.state.tasks] == [other, other]
    assert (run.state.lost_nodes, run.state.failures) == ((NODE,), 0)


def test_parts_of_a_job_that_are_about_to_begin_do_not_begin_once_it_is_stopped() -> None:
    run = running(W0, W1)
    dies(run, W1)
    dies(run, W1)
    assert run.state.task(W1).launch_at is not None
    run.feed(machine.StopRequestedEvent())
    run.exits(W0, -signal.SIGTERM)
    assert run.state.phase == "stopped" and run.feed(TickEvent()) == []


def test_who_waits_for_a_script_that_has_ended_well_goes_on_without_it() -> None:
    run = three()
    assert run.exits(W1, 0, elastic=(W0, W2)) == []
    actions = run.feed(PeersLostEvent((W0,)))
    assert actions[-1] == Publish(2) and "worker:1 ended well" in logged(actions)
    assert run.state.phase == "running" and run.state.failures == 0
    assert sorted(shard for held in shards(run).values() for shard in held) == [0, 1, 2]
    assert sorted(shards(run)) == ["worker:0", "worker:2"]
    # The next one is known to be waited for when it ends.
    assert run.exits(W2, 0, recovering=(W0,))[-1] == Publish(3)
    assert shards(run) == {"worker:0": (0, 1, 2)}
    assert "have ended" in logged(run.feed(ScaleRequestedEvent(2, "x", (1, 5), (W0,))))
    assert run.exits(W0)[-1] == Finish(0)


def test_all_tasks_run_again_where_the_last_one_fails_after_the_others_have_ended() -> None:
    run = running(W0, W1)
    run.exits(W1, 0, recovering=(W0,))
    dies(run, W0)
    assert run.tick()[-1] == Launch((W0, W1))
    assert shards(run) == {"worker:0": (0,), "worker:1": (1,)}


def test_a_final_failure_is_not_tried_again() -> None:
    run = running(W0, W1)
    final = replace(BUG, type="CollectiveMismatch", final=True)
    assert signals(dies(run, W0, 1, final)) == [("worker:1", "term")]
    assert run.exits(W1, -signal.SIGTERM)[-1] == Finish(1)
    assert "CollectiveMismatch" in run.state.reason and "not tried again" in run.state.reason


def test_a_final_failure_is_the_cause_whoever_ends_first() -> None:
    run = running(W0, W1)
    run.exits(W1, 1, BUG)
    run.exits(W0, 1, replace(BUG, message="final", final=True))
    assert "final" in run.state.reason and run.state.phase == "failed"


def on_three_nodes(**options: Any) -> JobRun:
    """Three workers on nodes of their own; each shard has its home there, and a copy on the next node."""
    a, b, c = nodes = (NodeId("a"), NodeId("b"), NodeId("c"))
    run = three(**options)
    placed = [replace(t, node=node) for t, node in zip(run.state.members, nodes, strict=True)]
    run.state = replace(run.state.with_task(*placed), holders=((a, b), (b, c), (c, a)))
    return run


def test_a_task_whose_node_is_away_is_launched_where_its_rows_have_a_copy() -> None:
    run = on_three_nodes()
    dies(run, W2)
    # The node was found to be away only when the launch failed there.
    failed = LaunchFailedEvent((W2,), "c can't be reached", (W0, W1), (NodeId("c"),))
    run.feed(failed)
    assert run.state.lost_nodes == (NodeId("c"),) and run.state.task(W2).node == NodeId("a")
    assert shards(run) == {"worker:0": (0, 2), "worker:1": (1,)}


def test_rows_that_nobody_has_are_not_adopted() -> None:
    run = on_three_nodes()
    dies(run, W2)
    away = (NodeId("c"), NodeId("a"))
    run.feed(LaunchFailedEvent((W2,), "c can't be reached", (W0, W1), away))
    assert run.state.phase == "stopping"


def test_a_task_without_rows_goes_beside_the_first_worker() -> None:
    state = running(W0, W1, PS).state
    a, b = NodeId("a"), NodeId("b")
    state = state.with_task(
        replace(state.task(W0), node=a), replace(state.task(W1), node=b), replace(state.task(PS), node=b)
    )
    assert recovery.choose_next_node(state, state.task(PS)) == b
    assert recovery.choose_next_node(replace(state, lost_nodes=(b,)), state.task(PS)) == a
    assert recovery.choose_next_node(replace(state, lost_nodes=(a, b)), state.task(PS)) in (b, NODE)
