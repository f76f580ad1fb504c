"""Tests of all workers are named alike in each, and by nothing else."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from insitu.train.elastic import TEST, LoopPosition
from insitu.train.parameter_server.step import SharedTests
from insitu.train.replica import ShardBatch


class Session:
    """Of a job with two shards; remembers the places of gathers."""

    num_shards, sequence, shards = 2, 0, (0, 1)

    def __init__(self) -> None:
        self.places: list[tuple[str, int]] = []

    def gather(self, place: str, sequence: int, arrays: Any) -> Any:
        self.places.append((place, sequence))
        return np.concatenate(list(arrays.values())), self.shards


def share(tests: SharedTests, depth: int = 1, steps: int = 2) -> None:
    for test in range(steps):
        tests.share(LoopPosition(0, TEST, depth, test=test), {0: np.ones((1, 2))})


def test_data_of_other_shards_or_of_all_are_each_worker_s_own() -> None:
    tests: Any = SharedTests(Session())  # type: ignore[arg-type]
    assert tests.applies([ShardBatch(0, 1, None, dataset_shards=2)])
    assert not tests.applies([ShardBatch(0, 1, None)])
    assert not tests.applies([ShardBatch(0, 1, None, dataset_shards=3)])
    assert not tests.applies([ShardBatch(shard, 1, None, dataset_shards=2) for shard in range(2)])


def test_each_test_has_a_place_of_its_own() -> None:
    session: Any = Session()
    tests = SharedTests(session)
    share(tests)
    tests.begin_fit(0)
    session.sequence = 5
    share(tests)
    share(tests, depth=2)
    share(tests, depth=2)
    tests.end_fit(0)
    share(tests)
    assert len(set(session.places)) == len(session.places)


def test_a_worker_that_was_restarted_comes_to_the_same_places() -> None:
    sessions: list[Any] = [Session(), Session()]
    both = [SharedTests(session) for session in sessions]
    for tests, session in zip(both, sessions, strict=True):
        tests.begin_fit(0)
        for sequence in (5, 10):
            session.sequence = sequence
            if tests is both[0] or sequence > 5:  # it was restarted before its first
                share(tests)
        tests.end_fit(0)
        share(tests)
    assert sessions[1].places == sessions[0].places[2:]


def test_rows_that_are_missing_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = Session()
    session.shards = (0,)
    tests = SharedTests(session)
    with caplog.at_level(logging.WARNING, "insitu"):
        share(tests)
    assert [record.getMessage()[:52] for record in caplog.records] == [
        "An evaluation leaves out rows of shards [1]: their w"
    ]
