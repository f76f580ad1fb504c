"""Who this process is, and what it may do with the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from models import in_shards

from insitu.errors import TrainingError
from insitu.spec import TaskId
from insitu.train.elastic.membership import AUTO, BAR, LINES, SILENT, SynchronousMembership


@pytest.fixture
def membership() -> SynchronousMembership:
    return SynchronousMembership(in_shards((0, 1), 2), "auto")


class Trainer:
    """Stands for a model's trainer: `CallLog` asks nothing of it here."""


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
