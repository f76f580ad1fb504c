"""A process knows of which events those before it have had callbacks hear."""

from __future__ import annotations

from pathlib import Path

from insitu.train.fit.entry import (
    TRAIN_BEGIN,
    TRAIN_END,
    key_of_batch_begin,
    key_of_batch_end,
    key_of_epoch_begin,
    key_of_test_begin,
)
from insitu.train.fit.meetings import HeardRecord, open_record


def test_events_up_to_the_furthest_were_heard(tmp_path: Path) -> None:
    path = tmp_path / "task" / "heard"
    first = HeardRecord(path)
    events = [TRAIN_BEGIN, key_of_epoch_begin(0), key_of_batch_begin(0, 0), key_of_batch_end(0, 0)]
    assert first.is_empty
    assert [first.note(0, event) for event in events] == [False] * 4
    assert not first.note(0, events[0]), "in the process itself nothing is a repetition"

    second = HeardRecord(path)
    assert not second.is_empty
    assert [second.note(0, event) for event in events] == [True] * 4
    assert not second.note(0, key_of_batch_begin(0, 1))

    third = HeardRecord(path)
    assert third.note(0, key_of_batch_begin(0, 1)) and not third.note(0, key_of_batch_end(0, 1))
    assert not third.note(0, TRAIN_END)
    assert not third.note(1, key_of_test_begin(0)), "a later call"
    assert HeardRecord(path).note(0, TRAIN_END), "all of an earlier call"


def test_a_note_that_was_being_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    written = HeardRecord(path)
    for batch in range(5):
        before = path.read_bytes()
        written.note(0, key_of_batch_begin(0, batch))
        after = path.read_bytes()
        changed = [index for index in range(len(after)) if after[index] != before[index]]
        half = bytearray(after)
        half[changed[-1]] ^= 1
        (tmp_path / "half").write_bytes(half)
        found = HeardRecord(tmp_path / "half")
        assert not found.note(0, key_of_batch_begin(0, batch))
        if batch:
            assert HeardRecord(tmp_path / "half").note(0, key_of_batch_begin(0, batch))
            assert found.note(0, key_of_batch_begin(0, batch - 1))


def test_a_process_opens_a_record_once(tmp_path: Path) -> None:
    record = open_record(tmp_path / "heard")
    record.note(0, TRAIN_BEGIN)
    assert open_record(tmp_path / "heard") is record


def test_without_room_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "heard").mkdir()
    record = HeardRecord(tmp_path / "heard")
    assert record.is_empty and not record.note(0, TRAIN_BEGIN)
    assert not record.note(0, TRAIN_BEGIN)
