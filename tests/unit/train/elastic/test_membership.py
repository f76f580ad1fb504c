"""Who this process is, and what it may do with the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from free_ports import free_addresses
from models import in_shards

import insitu.exchange
from insitu.base.errors import CollectiveMismatch, TrainingError
from insitu.base.spec import TaskId
from insitu.exchange import Group
from insitu.train.elastic.membership import AUTO, BAR, LINES, SILENT, SynchronousMembership
from insitu.train.replica import ModelState


@pytest.fixture
def membership() -> SynchronousMembership:
    return SynchronousMembership(in_shards((0, 1), 2), "auto")


class Trainer:
    """Stands for a model's trainer: `CallLog` asks it for no more here."""

    number, sets_up = 0, False

    @property
    def state(self) -> ModelState:
        return ModelState((), (), (), (), (), (), ())


def trainer() -> Any:
    return Trainer()


def test_a_task_with_the_only_shard_is_alone(membership: SynchronousMembership) -> None:
    assert SynchronousMembership(in_shards((0,), 1), "auto").is_alone
    assert not membership.is_alone
    assert membership.feed_options["shards"] == membership.launched_shards == (0, 1)


def test_fits_are_counted(membership: SynchronousMembership) -> None:
    assert [membership.count_fit(), membership.count_fit(), membership.fits] == [0, 1, 2]


def test_recovery_is_paused_in_nested_calls_only(membership: SynchronousMembership) -> None:
    elastic = []

    def nested() -> None:
        elastic.append(membership.reporter.elastic)

    def call() -> None:
        elastic.append(membership.reporter.elastic)
        membership.run_call(trainer(), nested)
        elastic.append(membership.reporter.elastic)

    membership.run_call(trainer(), call)
    assert elastic == [True, False, True]
    assert membership.reporter.elastic


def test_a_call_whose_result_can_not_be_kept_ends_recovery(membership: SynchronousMembership) -> None:
    membership.run_call(trainer(), lambda: object())
    assert not membership.calls.complete
    assert not membership.reporter.elastic


def test_the_group_outside_of_calls_ends_recovery(membership: SynchronousMembership) -> None:
    assert membership.group().size == 1
    assert membership.is_leader
    assert not membership.reporter.elastic


def test_the_chief_shows_progress(membership: SynchronousMembership, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, expected in ((True, BAR), (False, LINES)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        assert membership.verbosity(AUTO) == expected
    assert membership.verbosity(SILENT) == SILENT


def test_a_synchronous_strategy_is_for_workers() -> None:
    context = dataclasses.replace(in_shards((0,), 1), task=TaskId("ps", 0))
    with pytest.raises(TrainingError, match="Received: a task with the role 'ps'"):
        SynchronousMembership(context, "auto")


def run_together(*scripts: Callable[[SynchronousMembership], Any]) -> list[Any]:
    """Return what each script of a group of tasks returned or raised."""
    addresses = tuple(free_addresses(len(scripts)))

    def run(index: int) -> Any:
        here = dataclasses.replace(
            in_shards((index,), len(scripts)),
            task=TaskId("worker", index),
            workers=addresses,
            stall_timeout=40.0,
        )
        membership = SynchronousMembership(here, "auto")
        try:
            return scripts[index](membership)
        except Exception as error:
            return error
        finally:
            membership.lockstep.group.close()

    with ThreadPoolExecutor(len(scripts)) as pool:
        return list(pool.map(run, range(len(scripts))))


def call(name: str) -> Callable[[SynchronousMembership], Any]:
    return lambda membership: membership.run_call(trainer(), lambda: membership.check_call(name))


def test_tasks_that_make_the_same_call_go_on() -> None:
    assert run_together(call("fit"), call("fit")) == [None, None]


def test_a_call_that_one_task_makes_is_an_error_in_each() -> None:
    for error in run_together(call("evaluate"), call("fit")):
        assert isinstance(error, CollectiveMismatch)
        assert "worker:0 makes evaluate() as call 1" in str(error)
        assert "worker:1 makes fit() as call 1 at test_membership.py:" in str(error)


def test_a_call_that_meets_an_operation_of_a_loop_is_an_error_in_each() -> None:
    def loop(membership: SynchronousMembership) -> None:
        with membership.explain_loss("reduce"):
            membership.group().all_gather(np.zeros(3))

    first, second = run_together(call("fit"), loop)
    assert isinstance(first, CollectiveMismatch) and "worker:0 makes fit()" in str(first)
    assert isinstance(second, CollectiveMismatch) and "worker:1 makes reduce()" in str(second)


def test_without_the_others_a_task_evaluates_but_trains_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = dataclasses.replace(in_shards((0, 1), 2), workers=("127.0.0.1:1", "127.0.0.1:2"))
    membership = SynchronousMembership(alone, "auto")
    monkeypatch.setattr(membership._rendezvous, "_connect", lambda *_: solo(alone.shards))
    membership._rendezvous.ended = ("worker:1",)
    call("evaluate")(membership)
    call("predict")(membership)
    with pytest.raises(CollectiveMismatch, match=r"makes fit\(\) as call 3 .* script of worker:1 has ended"):
        call("fit")(membership)
    with pytest.raises(CollectiveMismatch, match=r"continues at test_membership\.py"):
        membership.group()
    membership.program_spans_tasks = True
    with pytest.raises(CollectiveMismatch, match="makes evaluate"):
        call("evaluate")(membership)


def solo(shards: tuple[int, ...]) -> Group:
    return insitu.exchange.join(0, ("127.0.0.1:1",), shards=shards, num_shards=len(shards), timeout=10.0)
