"""A group that forms anew by the controller's roster, and what this task reports of it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from insitu.base.context import Context
from insitu.base.errors import ExchangeError, TrainingError
from insitu.base.paths import Paths
from insitu.base.progress import read_progress
from insitu.base.roster import RECOVERING, Member, Roster, write_roster
from insitu.base.spec import TaskId
from insitu.train.elastic import roster_rendezvous
from insitu.train.elastic.lockstep import GenerationChanged
from insitu.train.elastic.progress_reporter import ProgressReporter
from insitu.train.elastic.roster_rendezvous import Released, RosterRendezvous

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


class FailingOnce:
    """A group that comes to nothing when it is first formed anew: a connection is lost meanwhile."""

    def __init__(self, after: Any) -> None:
        self.generation = 1
        self._after = after
        self.tried: list[int] = []

    def leave(self) -> None:
        pass

    def rejoin(self, generation: int, *_: Any, **__: Any) -> None:
        self.tried.append(generation)
        if len(self.tried) == 1:
            self._after()
            raise ExchangeError("worker:1 was lost")
        self.generation = generation


def roster(generation: int) -> Roster:
    members = (Member(W0, 1, "127.0.0.1:1", (0,)), Member(W1, generation, "127.0.0.1:2", (1,)))
    return Roster(generation, members)


def test_a_generation_that_failed_is_reported(tmp_path: Path) -> None:
    """So the controller knows that waiting won't help, though nobody has died."""
    context = Context(Paths(tmp_path), "j-1", W0, "c", (0,), 2, stall_timeout=30.0, generation=1)
    job = context.job
    assert job is not None
    job.task(W0).mkdir(parents=True)
    reporter = ProgressReporter(context)
    reporter.open()
    rendezvous = RosterRendezvous(context, reporter, "auto", "none")
    reported: list[tuple[str, int]] = []

    def at_the_loss() -> None:
        write_roster(job.roster, roster(3))

    group = FailingOnce(at_the_loss)
    report_place = reporter.report_place

    def report_and_read(name: str) -> None:
        report_place(name)
        record = read_progress(job.progress(W0))
        if record is not None:
            reported.append((record.place, record.generation))

    reporter.report_place = report_and_read  # type: ignore[method-assign]
    write_roster(job.roster, roster(2))
    rendezvous.rejoin(group, ExchangeError("worker:1 was lost"))  # type: ignore[arg-type]
    assert group.tried == [2, 3]
    assert reported == [(RECOVERING, 0), (RECOVERING, 2), ("", 3)]


def rendezvous_in(root: Path) -> RosterRendezvous:
    context = Context(Paths(root), "j-1", W0, "c", (0,), 2, stall_timeout=30.0, incarnation=1)
    assert context.job is not None
    context.job.task(W0).mkdir(parents=True)
    return RosterRendezvous(context, ProgressReporter(context), "auto", "none")


def test_a_task_takes_over_the_shards_that_the_roster_gives_it(tmp_path: Path) -> None:
    rendezvous = rendezvous_in(tmp_path)
    members = (Member(W1, 1, "127.0.0.1:2", ()), Member(W0, 1, "127.0.0.1:1", (0, 1)))
    assert rendezvous.adopt_assignment(Roster(2, members)) == 1
    assert rendezvous.context.shards == (0, 1)


def test_a_task_that_the_roster_leaves_out_ends_well(tmp_path: Path) -> None:
    rendezvous = rendezvous_in(tmp_path)
    with pytest.raises(Released) as released:
        rendezvous.adopt_assignment(Roster(2, (Member(W0, 2, "127.0.0.1:1", (0,)),)))
    assert released.value.code == 0


def test_a_newer_generation_interrupts_training_where_the_task_is_elastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_rendezvous, "TRAINING_POLL_INTERVAL", 0.0)
    rendezvous = rendezvous_in(tmp_path)
    group: Any = FailingOnce(lambda: None)
    write_roster(rendezvous.context.job.roster, roster(1))  # type: ignore[union-attr]
    rendezvous.raise_if_superseded(group)
    write_roster(rendezvous.context.job.roster, roster(2))  # type: ignore[union-attr]
    with rendezvous._reporter.pause_recovery():
        rendezvous.raise_if_superseded(group)
    with pytest.raises(GenerationChanged):
        rendezvous.raise_if_superseded(group)


def test_a_task_that_is_not_elastic_waits_only_for_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_rendezvous, "VERDICT_TIMEOUT", 0.0)
    rendezvous = rendezvous_in(tmp_path)
    rendezvous._reporter.disable_recovery()
    group: Any = FailingOnce(lambda: None)
    with pytest.raises(ExchangeError, match="worker:1 was lost"):
        rendezvous.rejoin(group, ExchangeError("worker:1 was lost"))
    assert group.tried == []
    assert rendezvous.find_ended(group) == ()


def test_a_task_learns_whose_scripts_have_ended_well(tmp_path: Path) -> None:
    rendezvous = rendezvous_in(tmp_path)
    job = rendezvous.context.job
    assert job is not None
    rendezvous._reporter.open()
    rendezvous._reporter.report_idle()
    rendezvous._reporter.disable_recovery()
    alone = Roster(2, (Member(W0, 1, "127.0.0.1:1", (0, 1)),), ended=(W1,))
    assert Roster.from_json(alone.to_json()) == alone
    write_roster(job.roster, alone)
    group: Any = FailingOnce(lambda: None)
    assert rendezvous.find_ended(group) == ("worker:1",)
    group.tried.append(0)
    rendezvous.rejoin(group, ExchangeError("worker:1 was lost"))
    assert rendezvous.ended == ("worker:1",) and rendezvous.context.shards == (0, 1)


def test_a_group_is_freed_with_its_strategy(tmp_path: Path, monkeypatch: Any) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(roster_rendezvous.atexit, "register", lambda *call: at_exit.append(call))
    context = Context(Paths(tmp_path), "", W0, "c", (0,), 1, stall_timeout=30.0)
    group = RosterRendezvous(context, ProgressReporter(context), "auto", "none").join()
    freed = weakref.ref(group)
    del group
    gc.collect()
    assert freed() is None
    ((leave, *arguments),) = at_exit
    leave(*arguments)  # and nothing happens


def test_a_second_strategy_joins_once_the_first_is_freed(tmp_path: Path, monkeypatch: Any) -> None:
    class Joined:
        generation = 1
        stats: ClassVar[dict[str, Any]] = {}

    made: list[Any] = []
    monkeypatch.setattr(roster_rendezvous.insitu.exchange, "join", lambda *_, **__: Joined())
    monkeypatch.setattr(roster_rendezvous.atexit, "register", lambda *call: made.append(call))
    monkeypatch.setattr(roster_rendezvous, "_groups", weakref.WeakSet())
    workers = ("127.0.0.1:1", "127.0.0.1:2")
    context = Context(
        Paths(tmp_path), "j-1", W0, "c", (0,), 2, workers=workers, stall_timeout=30.0, incarnation=1
    )
    assert context.job is not None
    context.job.task(W0).mkdir(parents=True)
    write_roster(context.job.roster, roster(1))
    monkeypatch.setattr(Context, "secret", lambda _: b"secret")

    def join() -> Any:
        return RosterRendezvous(context, ProgressReporter(context), "auto", "none").join()

    first = join()
    first.cycle = first
    with pytest.raises(TrainingError, match=r"one strategy at a time.*worker:0"):
        join()
    del first
    gc.disable()  # so that only the join can collect it
    try:
        assert join().generation == 1
    finally:
        gc.enable()
    assert len(made) == 2


def test_a_wait_is_vain_once_a_roster_lacks_one_of_the_group(tmp_path: Path) -> None:
    """Not where all are still there: they may have lost a connection, which the exchange finds itself."""
    rendezvous = rendezvous_in(tmp_path)
    reporter, job = rendezvous._reporter, rendezvous.context.job
    assert job is not None
    assert not rendezvous._is_superseded()
    write_roster(job.roster, roster(1))
    rendezvous.adopt_assignment(roster(1))
    write_roster(job.roster, replace(roster(1), generation=2))
    assert not rendezvous._is_superseded()
    write_roster(job.roster, roster(3))
    assert rendezvous._is_superseded()
    with reporter.pause_recovery():  # nobody could continue without it
        assert not rendezvous._is_superseded()
    rendezvous.adopt_assignment(roster(3))
    assert not rendezvous._is_superseded()
