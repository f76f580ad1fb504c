"""The ledger of a fit, also if there is no room for it."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.errors import GridError, StorageFull
from insitu.base.paths import JobPaths
from insitu.grid import ShardLedger
from insitu.train.fit import bookkeeping
from insitu.train.fit.bookkeeping import Bookkeeper


class Reporter:
    rows = 0

    def begin_training(self, read_updates: Any) -> None: ...

    def count_step(self, logs: Any) -> None: ...

    def report_idle(self) -> None: ...


class Disk:
    """Has no room for the next `refusals` ledgers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusals = 0
        publish = ShardLedger.publish

        def refuse(ledger: ShardLedger, job: JobPaths) -> None:
            if self.refusals:
                self.refusals -= 1
                raise StorageFull("No room is left")
            publish(ledger, job)

        monkeypatch.setattr(ShardLedger, "publish", refuse)


@pytest.fixture
def job(tmp_path: Any) -> JobPaths:
    made = JobPaths(tmp_path / "job")
    made.epoch_ledger(0, 0).parent.mkdir(parents=True)
    return made


@pytest.fixture
def books(job: JobPaths) -> Bookkeeper:
    context = SimpleNamespace(job=job, cache="c", replicas_per_shard=1, shards_of_job=(0,))
    membership: Any = SimpleNamespace(context=context, reporter=Reporter())
    made = Bookkeeper(membership)
    made.begin(SimpleNamespace(feed=SimpleNamespace(cache="c")))  # type: ignore[arg-type]
    return made


def step(epoch: int, *, last: bool = True) -> Any:
    part = SimpleNamespace(rows=3, shard=0, origins=[(0, [3 * epoch, 3 * epoch + 1, 3 * epoch + 2])])
    return SimpleNamespace(parts=[part], epoch=epoch, last=last)


def rows(job: JobPaths, epoch: int) -> int | None:
    ledger = ShardLedger.published(job, epoch, 0)
    return None if ledger is None else sum(account.rows for account in ledger.counts.values())


def test_a_full_disk_does_not_end_training_and_the_ledger_is_written_later(
    books: Bookkeeper, job: JobPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(bookkeeping, "_RETRY_INTERVAL", 0.0)
    disk.refusals = 2
    books.record(step(0))
    assert rows(job, 0) is None
    books.record(step(1, last=False))
    assert rows(job, 0) is None
    books.record(step(1, last=False))
    assert rows(job, 0) == 3
    assert len(caplog.records) == 1 and "is left. Training continues; it is tried again." in caplog.text
    books.record(step(1))
    assert rows(job, 1) == 9
    books.end()


def test_what_can_not_be_written_by_the_end_of_a_fit_is_an_error(
    books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.refusals = 1000
    books.record(step(0))
    with pytest.raises(StorageFull):
        books.end()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_fails_is_named_and_older_ledgers_stay(
    books: Bookkeeper, job: JobPaths, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    books.record(step(0))
    before = job.epoch_ledger(0, 0).read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("insitu.base.disk.durable.os.fsync", refuse)
        with pytest.raises(GridError, match=f"{job.epoch_ledger(1, 0)}.*(Free some space|system's log)"):
            books.record(step(1))
            books.end()
    assert job.epoch_ledger(0, 0).read_bytes() == before
    assert [path.name for path in job.ledger.iterdir()] == [job.epoch_ledger(0, 0).name]


def test_rows_that_were_left_out_are_written_at_once(
    books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.refusals = 1
    with pytest.raises(StorageFull):
        books.record(step(0, last=False), left_out=(0,))


def test_ledgers_that_were_lost_with_a_host_are_made_up(books: Bookkeeper, job: JobPaths) -> None:
    """Shard 0's of the epochs 3 and 4 hadn't been copied from its host, when that lost its power.

    They stayed away for ever. Nothing shows that epoch 1 was trained: the fit may have begun at epoch 2.
    """
    books.record(step(2))
    for epoch in (2, 3, 4):
        ledger = ShardLedger(epoch, 1)
        ledger.complete = True
        ledger.publish(job)
    feed: Any = SimpleNamespace(
        cache="c",
        count_steps=lambda epoch: 4,
        find_pass=lambda epoch, step: (epoch, step),
        origins=lambda shard, epoch, stop: [(0, [3 * epoch + n]) for n in range(stop)],
    )
    context = SimpleNamespace(job=job, cache="c", replicas_per_shard=1, shards_of_job=(0,), num_shards=2)
    membership: Any = SimpleNamespace(context=context, reporter=Reporter())
    taker = Bookkeeper(membership)
    taker.begin(SimpleNamespace(feed=feed, data_position=lambda epoch, step: (epoch, step)))  # type: ignore[arg-type]
    position: Any = SimpleNamespace(epoch=5, step=2)
    taker.restore(position)
    assert [rows(job, epoch) for epoch in range(7)] == [None, None, 3, 4, 4, None, None]
    taker.end()
    assert rows(job, 5) == 2
