"""The ledger: what it proves, and what it admits not to know."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import GridError
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo, ShardMap
from insitu.grid.reading import ledger as ledger_module
from insitu.grid.reading.ledger import (
    ShardLedger,
    audit,
    checksum_of_all_rows,
    checksum_of_rows,
    count_rows,
    list_epochs,
    merge_epochs,
    read_ledgers,
)

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
    monkeypatch.setattr("insitu.grid.reading.ledger._PENDING_ROWS", 10)
    monkeypatch.setattr("insitu.grid.reading.ledger._CHUNK_ROWS", 7)
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


def publish_epochs(job: JobPaths, epochs: Iterable[int]) -> None:
    for epoch in epochs:
        for ledger in ledgers(epoch):
            ledger.publish(job)


def write_at_once(path: Path, data: bytes) -> None:
    """Do as `publish_file`, without waiting for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_a_long_training_has_few_files_and_short_ones(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    job = paths.job("job-1")
    monkeypatch.setattr(ledger_module, "publish_file", write_at_once)
    sizes = []
    for start in range(0, 512, 128):
        publish_epochs(job, range(start, start + 128))
        files = list(job.ledger.iterdir())
        sizes.append(sum(file.stat().st_size for file in files))
        assert len(files) <= 2 * (2 * 64 + 2)
    assert max(sizes) < 1.1 * sizes[0]
    assert list_epochs(job) == list(range(512))
    assert count_rows(job) == 512 * sum(ROWS)
    assert all(epoch.complete and epoch.clean for epoch in audit(CACHE, MAP, read_ledgers(job)))
    assert [ledger.epoch for ledger in read_ledgers(job, 510)] == [510, 510, 511, 511]
    found = ShardLedger.published(job, 3, 1)
    assert found is not None and found.to_json() == ledgers(3)[1].to_json()
    assert ShardLedger.published(job, 512, 1) is None


def test_what_differs_stays_when_epochs_are_merged(paths: Paths) -> None:
    job = paths.job("job-1")
    publish_epochs(job, range(100))
    twice = ledgers(40)[0]
    twice.add(0, np.array([1]), left_out=True)
    twice.publish(job)
    half = ShardLedger(50, 0)
    half.add(0, np.arange(4))
    half.publish(job)
    publish_epochs(job, range(100, 200))
    by_key = {(ledger.epoch, ledger.shard): ledger for ledger in read_ledgers(job)}
    assert by_key.keys() == {(epoch, shard) for epoch in range(200) for shard in (0, 1)}
    assert by_key[40, 0].to_json() == twice.to_json()
    assert by_key[50, 0].to_json() == half.to_json()
    assert count_rows(job) == 200 * sum(ROWS) + 1 + 4 - sum(c.rows for c in ledgers()[0].counts.values())
    # Another fit trains the same epochs again: the newest counts.
    ledgers(40)[0].publish(job)
    assert {(each.epoch, each.shard): each for each in read_ledgers(job)}[40, 0].counts[0].rows == ROWS[0]
    assert (found := ShardLedger.published(job, 40, 0)) is not None and found.counts[0].rows == ROWS[0]


@given(st.data())
def test_no_epoch_is_lost_whenever_merging_is_interrupted(data: st.DataObject) -> None:
    """Whichever of the files that merging writes and removes are there, all epochs are."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        job, truth = JobPaths(Path(folder)), dict[int, str]()
        patch.setattr(ledger_module, "_MERGED_EVERY", 1 << 30)
        patch.setattr(ledger_module, "publish_file", write_at_once)
        unlink, write = Path.unlink, write_at_once
        left = [0]

        def stop_or(action: Callable[..., None]) -> Callable[..., None]:
            def do(*arguments: Any, **options: Any) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError("killed")
                action(*arguments, **options)

            return do

        for _ in range(data.draw(st.integers(1, 8))):
            for epoch in data.draw(st.lists(st.integers(0, 12), max_size=6)):
                made = ShardLedger(epoch, 0)
                made.add(0, np.arange(data.draw(st.integers(0, 2))))
                made.complete = data.draw(st.integers(0, 4)) > 0
                made.publish(job)
                truth[epoch] = json.dumps(made.to_json())
            left[0] = data.draw(st.integers(0, 8))
            patch.setattr(Path, "unlink", stop_or(unlink))
            patch.setattr(ledger_module, "publish_file", stop_or(write))
            with contextlib.suppress(OSError):
                merge_epochs(job, 0)
            patch.setattr(Path, "unlink", unlink)
            patch.setattr(ledger_module, "publish_file", write)
            assert {each.epoch: json.dumps(each.to_json()) for each in read_ledgers(job)} == truth
            for epoch in truth:
                found = ShardLedger.published(job, epoch, 0)
                assert found is not None and json.dumps(found.to_json()) == truth[epoch]


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
