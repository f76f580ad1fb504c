"""A worker on parameter servers stands alone: nothing of it waits for others until its script asks for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from insitu.base.context import Context
from insitu.base.errors import TrainingError
from insitu.base.paths import Paths
from insitu.base.progress import Progress, read_progress
from insitu.base.roster import Member, Roster, write_roster
from insitu.base.spec import TaskId
from insitu.train.elastic import TRAIN, LoopPosition
from insitu.train.parameter_server.async_membership import GenerationFollower, ServerMembership

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
POSITION = LoopPosition(0, TRAIN)


def of_job(tmp_path: Path, task: TaskId = W0) -> Context:
    """The context of a task of a job whose roster, of generation 1, has both workers."""
    context = Context(Paths(tmp_path), "j-1", task, "c", (task.index,), 2, generation=1)
    assert context.job is not None
    context.job.task(task).mkdir(parents=True)
    publish(context, 1)
    return context


def publish(context: Context, generation: int) -> None:
    assert context.job is not None
    members = tuple(Member(t, 1, f"127.0.0.1:{t.index + 1}", (t.index,)) for t in (W0, W1))
    write_roster(context.job.roster, Roster(generation, members))


def record(context: Context) -> Progress:
    assert context.job is not None
    found = read_progress(context.job.progress(context.task))
    assert found is not None
    return found


def test_units_are_not_done_together(tmp_path: Path) -> None:
    membership = ServerMembership(of_job(tmp_path))

    def work(group: Any) -> Any:
        raise AssertionError("the group is not to be joined")

    assert membership.lockstep.find_resume_point() is None
    assert membership.lockstep.run_unit_until_done(POSITION, work).size == 0
    membership.lockstep.check_before_next_unit()


def test_the_chief_leads_without_a_group(tmp_path: Path) -> None:
    assert ServerMembership(of_job(tmp_path / "a")).is_leader
    other = ServerMembership(of_job(tmp_path / "b", W1))
    assert not other.is_leader and not other.shards_move


def test_calls_keep_the_task_elastic_and_no_results(tmp_path: Path) -> None:
    membership = ServerMembership(of_job(tmp_path))
    trainer: Any = object()
    elastic = []

    def outer() -> object:
        membership.run_call(trainer, lambda: elastic.append(membership.reporter.elastic))
        return object()  # what no log of calls could keep

    result = membership.run_call(trainer, outer)
    assert type(result) is object and elastic == [True] and membership.reporter.elastic
    assert membership.calls.position(TRAIN) == LoopPosition(1, TRAIN)
    assert not membership.calls.is_finished(None) and membership.calls.staged_call(None) is None


def test_a_script_that_asks_for_the_group_joins_it_once(tmp_path: Path) -> None:
    membership = ServerMembership(Context(Paths(tmp_path)))
    group = membership.group()
    assert group.size == 1 and membership.group() is group
    assert not membership.reporter.elastic


def test_it_is_for_workers(tmp_path: Path) -> None:
    context = dataclasses.replace(Context(Paths(tmp_path)), task=TaskId("evaluator", 0))
    with pytest.raises(TrainingError, match="Received: a task with the role 'evaluator'"):
        ServerMembership(context)


def test_it_reports_the_newest_generation_while_it_trains(tmp_path: Path) -> None:
    context = of_job(tmp_path)
    membership = ServerMembership(context)
    assert (record(context).generation, record(context).elastic) == (1, True)
    publish(context, 3)
    follower = membership.reporter
    look_now(follower)
    follower.report(POSITION, "gradient")
    assert (record(context).generation, record(context).place) == (3, "gradient")


def test_it_reports_a_newer_generation_while_it_waits(tmp_path: Path) -> None:
    context = of_job(tmp_path)
    follower = ServerMembership(context).reporter
    follower.report(POSITION, "push and pull")
    publish(context, 2)
    look_now(follower)
    follower.follow_generation()
    assert (record(context).generation, record(context).place) == (2, "push and pull")


def test_outside_a_job_there_is_no_generation(tmp_path: Path) -> None:
    follower = GenerationFollower(Context(Paths(tmp_path)))
    follower.open()
    follower.follow_generation()
    assert list(tmp_path.iterdir()) == []


def look_now(follower: GenerationFollower) -> None:
    """Let the next report look for a roster, however soon it comes."""
    follower._last_look = float("-inf")
