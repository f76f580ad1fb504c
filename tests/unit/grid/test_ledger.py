"""The ledger: what it proves, and what it admits not to know."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.errors import GridError
from insitu.grid.ledger import (
    ShardLedger,
    audit,
    checksum_of_all_rows,
    checksum_of_rows,
    list_epochs,
    read_ledgers,
)
from insitu.paths import Paths
from insitu.spec import CacheSpec, Column, NodeId, PartitionInfo, ShardMap

ROWS = (10, 7, 0, 5)
CACHE = CacheSpec(
    "a",
    3,
    (Column("x", "int64"),),
    tuple(PartitionInfo(i, n, 1, "crc32:0", (NodeId("node-0"),)) for i, n in enumerate(ROWS)),
    0,
    None,
    0.0,
)
MAP = ShardMap("a", 3, ((0, 2), (1, 3)))


def ledgers(epoch: int = 0, *, complete: bool = True) -> list[ShardLedger]:
    """Those of an epoch in which everything went right."""
    made = []
    for shard, held in enumerate(MAP.shards):
        ledger = ShardLedger(epoch, shard)
        for partition in held:
            ledger.add(partition, np.arange(ROWS[partition]))
        ledger.complete = complete
        made.append(ledger)
    return made


def test_a_clean_epoch() -> None:
    (epoch,) = audit(CACHE, MAP, ledgers())
    assert (epoch.complete, epoch.clean, epoch.lost, epoch.repeated) == (True, True, 0, 0)
    assert epoch.expected == epoch.counted == sum(ROWS)


def test_lost_and_repeated_rows_are_counted() -> None:
    made = ledgers()
    made[0].add(0, np.array([3, 4]))
    made[1] = ShardLedger(0, 1)
    made[1].add(1, np.arange(6))
    made[1].add(3, np.arange(5))
    made[1].complete = True
    (epoch,) = audit(CACHE, MAP, made)
    assert (epoch.clean, epoch.lost, epoch.repeated) == (False, 1, 2)
    assert [p.clean for p in epoch.partitions] == [False, False, True, True]


def test_rows_that_entered_no_update_are_counted_apart(paths: Paths) -> None:
    made = ledgers(complete=False)[:1]
    made[0].add(2, np.empty(0, np.int64), left_out=True)
    late = ShardLedger(0, 1)
    late.add(1, np.arange(4), left_out=True)
    late.add(1, np.arange(4, 7))
    late.add(3, np.arange(5), left_out=True)
    job = paths.job("late-000000")
    job.ledger.mkdir(parents=True)
    late.publish(job)
    (epoch,) = audit(CACHE, MAP, [*made, *read_ledgers(job)])
    assert (epoch.clean, epoch.left_out) == (True, 9)
    assert [p.left_out for p in epoch.partitions] == [0, 4, 0, 5]


def test_a_row_twice_for_another_shows_in_the_checksum() -> None:
    made = ledgers()
    made[0] = ShardLedger(0, 0)
    made[0].add(0, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 8]))
    made[0].complete = True
    (epoch,) = audit(CACHE, MAP, made)
    assert (epoch.clean, epoch.lost, epoch.repeated) == (False, 0, 0)


def test_an_epoch_under_way_has_lost_nothing_yet() -> None:
    made = [*ledgers(0), *ledgers(1, complete=False)]
    made[2] = ShardLedger(1, 0)
    first, second = audit(CACHE, MAP, made)
    assert first.complete and not second.complete
    assert second.clean and second.lost == 0 and second.counted == 12
    made[3].add(1, np.array([0]))
    assert not audit(CACHE, MAP, made)[1].clean and audit(CACHE, MAP, made)[1].repeated == 1


def test_a_shard_without_rows_need_not_report() -> None:
    shards = ShardMap("a", 3, ((0, 1, 3), (2,)))
    ledger = ShardLedger(0, 0)
    for partition in (0, 1, 3):
        ledger.add(partition, np.arange(ROWS[partition]))
    ledger.complete = True
    (epoch,) = audit(CACHE, shards, [ledger])
    assert epoch.complete and epoch.clean


def test_rows_counted_by_a_shard_that_does_not_hold_them_are_unclean() -> None:
    one, other = ShardLedger(0, 0), ShardLedger(0, 1)
    for ledger, partitions in ((one, (0, 1)), (other, (3,))):
        for partition in partitions:
            ledger.add(partition, np.arange(ROWS[partition]))
        ledger.complete = True
    (epoch,) = audit(CACHE, MAP, [one, other])
    assert not epoch.clean and epoch.lost == 0


@given(st.permutations(range(200)), st.integers(1, 60))
def test_order_and_batches_do_not_matter(rows: list[int], size: int) -> None:
    ledger = ShardLedger(0, 0)
    for start in range(0, 200, size):
        ledger.add(4, np.array(rows[start : start + size]))
    account = ledger.counts[4]
    assert (account.rows, account.checksum) == (200, checksum_of_all_rows(200))


def test_large_counts_fold_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.grid.ledger._PENDING_ROWS", 10)
    monkeypatch.setattr("insitu.grid.ledger._CHUNK_ROWS", 7)
    ledger = ShardLedger(0, 0)
    for start in range(0, 100, 5):
        ledger.add(0, np.arange(start, start + 5))
        assert ledger._pending_rows < 10
    assert ledger.counts[0].checksum == checksum_of_rows(np.arange(100)) == _sum_in_chunks(100)


def _sum_in_chunks(rows: int) -> int:
    checksum_of_all_rows.cache_clear()
    try:
        return checksum_of_all_rows(rows)
    finally:
        checksum_of_all_rows.cache_clear()


def test_a_ledger_survives_json_and_the_disk(paths: Paths) -> None:
    job = paths.job("job-1")
    for epoch in (0, 1):
        for ledger in ledgers(epoch, complete=epoch == 0):
            ledger.publish(job)
    restored = read_ledgers(job)
    assert [(ledger.epoch, ledger.shard) for ledger in restored] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [ledger.to_json() for ledger in restored[:2]] == [ledger.to_json() for ledger in ledgers()]
    again = ShardLedger.from_json(json.loads(json.dumps(ledgers()[0].to_json())))
    again.add(0, np.array([1]))
    assert again.counts[0].rows == 11
    assert [epoch.complete for epoch in audit(CACHE, MAP, restored)] == [True, False]


def test_the_last_epochs_are_read_alone(paths: Paths) -> None:
    job = paths.job("job-1")
    assert list_epochs(job) == [] and read_ledgers(job) == []
    job.ledger.mkdir(parents=True)
    for epoch in (0, 9, 99_999, 100_000):  # whose names are in another order
        for ledger in ledgers(epoch):
            ledger.publish(job)
    (job.ledger / "epoch-00011.shard-00000.json.tmp").write_text("half")
    assert list_epochs(job) == [0, 9, 99_999, 100_000]
    assert [(found.epoch, found.shard) for found in read_ledgers(job, 10)] == [
        (99_999, 0), (99_999, 1), (100_000, 0), (100_000, 1)
    ]  # fmt: skip
    assert len(read_ledgers(job)) == 8


def test_what_is_no_ledger_is_refused(paths: Paths) -> None:
    job = paths.job("job-1")
    ledgers()[0].publish(job)
    job.epoch_ledger(0, 0).write_text('{"epoch": 0}')
    with pytest.raises(GridError, match=r"ledger at .* can't be read"):
        read_ledgers(job)
    with pytest.raises(GridError, match="another cache"):
        audit(CACHE, MAP, [ShardLedger(0, 9)])
    with pytest.raises(GridError, match="version 4"):
        audit(CACHE, ShardMap("a", 4, MAP.shards), [])
