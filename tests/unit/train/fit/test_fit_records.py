"""What a worker on servers has recorded of its fit leads its next process to where its callbacks were."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from insitu.train.fit.entry import (
    key_behind_epoch,
    key_of_batch_begin,
    key_of_batch_end,
    key_of_epoch_begin,
    key_of_epoch_end,
    key_of_test_begin,
)
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.fit.meetings import FitRecord, FitRecords, find_place

LENGTHS = EpochLengths(5, 0)


def test_the_newest_record_counts_that_is_not_ahead_of_the_servers(tmp_path: Path) -> None:
    records = FitRecords(tmp_path, 1)
    assert records.find(0, 1) is None
    for epoch in range(3):
        records.write(key_of_batch_begin(epoch, 0), {"at": f"begin {epoch}", "best": np.arange(3.0)})
        records.write(key_of_epoch_end(epoch), {"at": f"steps {epoch}"})
        records.write(key_behind_epoch(epoch), {"at": f"end {epoch}"})

    def found(epoch: int, step: int) -> str:
        record = records.find(epoch, step)
        return record.state["at"] if record is not None else ""

    assert found(3, 0) == "end 2"
    # Servers that were restored from a checkpoint have less than the worker had done.
    assert found(2, 4) == "begin 2" and found(2, 0) == "begin 2" and found(1, 1) == "begin 1"
    assert FitRecords(tmp_path, 2).find(3, 0) is None


def test_a_damaged_record_is_passed_over_and_old_ones_go(tmp_path: Path) -> None:
    records = FitRecords(tmp_path, 0)
    for epoch in range(20):
        records.write(key_behind_epoch(epoch), {"at": epoch})
    files = sorted((tmp_path / "fit-0").iterdir())
    assert len(files) == 12
    files[-1].write_bytes(b"half")
    record = records.find(20, 0)
    assert record is not None and record.state == {"at": 18}


@pytest.mark.parametrize("call", ["read_bytes", "iterdir"])
def test_a_storage_that_fails_is_no_lack_of_records(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = FitRecords(tmp_path, 0)
    records.write(key_behind_epoch(0), {"at": 0})

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(Path, call, fail)
    with pytest.raises(OSError, match="the disk fails"):
        records.find(1, 0)


def test_what_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    records = FitRecords(tmp_path, 0)
    records.write(key_behind_epoch(0), {"at": object()})
    assert records.find(1, 0) is None


@pytest.mark.parametrize(
    ("heard", "place", "where", "next_event"),
    [
        # All steps of epoch 1 are done; its end wasn't heard, or maybe wasn't.
        (key_of_batch_begin(1, 0), (2, 0), (1, 5), key_of_batch_end(1, 4)),
        (key_of_test_begin(1), (2, 0), (1, 5), key_of_test_begin(1)),
        (key_of_epoch_end(1), (2, 0), (1, 5), key_of_epoch_end(1)),
        (key_behind_epoch(1), (2, 0), (2, 0), key_of_epoch_begin(2)),
        (key_of_batch_begin(2, 0), (2, 0), (2, 0), key_of_batch_begin(2, 0)),
        (key_of_batch_begin(2, 0), (2, 3), (2, 3), key_of_batch_begin(2, 3)),
    ],
)
def test_a_worker_goes_on_where_its_callbacks_were(
    heard: tuple[int, int, int, int],
    place: tuple[int, int],
    where: tuple[int, int],
    next_event: tuple[int, int, int, int],
) -> None:
    found, entry = find_place(FitRecord(heard, {}), *place, LENGTHS)
    assert found == where
    assert not entry.was_heard(next_event)
    before = (*next_event[:3], next_event[3] - 2)
    assert entry.was_heard(before)
