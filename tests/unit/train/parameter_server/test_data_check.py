"""Workers of a synchronous fit must be given the same data: the servers keep what each has seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parameter_servers import clients, servers

from insitu.base.errors import InputError
from insitu.train.elastic import LoopPosition
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.parameter_server.step import CHECK_INTERVAL, DataCheck
from insitu.train.replica import ShardBatch

START = LoopPosition(0, "train")
DIFFERS = "given the same data.*the process of shard 1 has another batch than that of shard 0"


@pytest.fixture
def both() -> Iterator[list[DataCheck]]:
    """The checks of two workers, each in its first fit."""
    with servers(total_replicas=2) as addresses, clients(addresses, 2) as made:
        checks = [DataCheck(ServerMarks(client, 2, 30.0), [shard]) for shard, client in enumerate(made)]
        for check in checks:
            check.begin(0, resumed=False)
        yield checks


def note(check: DataCheck, fingerprint: int, step: int = 0, epoch: int = 0) -> None:
    check.note(START.at_step(epoch, step), [ShardBatch(0, 1, [], (), fingerprint)])


def test_other_data_is_found_by_both_workers(both: list[DataCheck]) -> None:
    note(both[0], 7)
    note(both[1], 2**52 - 2)
    for check in both:
        with pytest.raises(InputError, match=DIFFERS):
            check.compare()


def test_batches_between_two_comparisons_count(both: list[DataCheck]) -> None:
    for check, odd in zip(both, (8, 9), strict=True):
        note(check, 7)
        check.compare()
        for step in range(1, CHECK_INTERVAL):
            note(check, odd if step == 3 else 7, step)
            check.compare()
    for check in both:
        note(check, 7, CHECK_INTERVAL)
    for check in both:
        with pytest.raises(InputError, match=f"at call 0 train epoch 0 step {CHECK_INTERVAL}, the process"):
            check.compare()


def test_the_last_batches_are_compared_when_a_fit_ends(both: list[DataCheck]) -> None:
    for check, last in zip(both, (8, 9), strict=True):
        note(check, 7)
        note(check, last, 1)
        check.record_end()
    for check in both:
        with pytest.raises(InputError, match="at the end of fit 0, the process"):
            check.compare()


def test_who_has_not_come_so_far_or_stops_elsewhere_is_not_waited_for(both: list[DataCheck]) -> None:
    first, second = both
    note(first, 7)
    first.compare()
    note(first, 8, 1)
    first.record_end()
    first.compare()
    note(second, 7)
    second.record_end()  # behind its first step
    second.compare()


def test_a_worker_that_comes_back_in_the_middle_compares_what_it_has_seen_whole(
    both: list[DataCheck],
) -> None:
    first, second = both
    second.begin(0, resumed=True)
    for step in range(3):
        note(first, 7, step)
    note(second, 7, 2)
    for check in both:
        note(check, 7, 0, epoch=1)  # of what came before it the second has not seen all
        check.compare()
        note(check, 7 if check is first else 8, 1, epoch=1)
    for check in both:
        check.record_end()
    with pytest.raises(InputError, match=DIFFERS):
        first.compare()


def test_data_that_may_differ_is_not_compared() -> None:
    """An insitu.Dataset has no fingerprints, and its servers need not be asked."""
    check = DataCheck(None, [0])  # type: ignore[arg-type]
    check.begin(0, resumed=False)
    note(check, 0)
    check.note(START, [])
    check.record_end()
    check.compare()
