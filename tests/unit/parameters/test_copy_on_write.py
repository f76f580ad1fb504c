"""Rows of a table as they were at one snapshot."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_servers import DEADLINE

from insitu.base.errors import CheckpointError
from insitu.parameters import copy_on_write
from insitu.parameters.copy_on_write import SavedRowIndex, SnapshotArray, TableSnapshot
from insitu.parameters.tables import Eviction, RowStore, Table

WIDTH = 3


def a_table(count: int, **options: Any) -> RowStore:
    rows = RowStore(Table("t", WIDTH, updater="adam", **options))
    rows.pull(np.arange(count), np.empty((count, WIDTH), np.float32))
    return rows


def copied(rows: RowStore) -> dict[str, Any]:
    return {kind: array.copy() for kind, array in rows.arrays().items()}


def read(snapshot: TableSnapshot, kind: str, block: int) -> Any:
    kept = SnapshotArray(snapshot, kind)
    out = np.empty(kept.shape, kept.dtype)
    for low in range(0, len(kept), block):
        high = min(len(kept), low + block)
        kept.read(low, high, out[low:high])
    return out


def push(rows: RowStore, keys: Any) -> None:
    keys = np.unique(np.asarray(keys, np.int64))
    rows.push(keys, np.ones((len(keys), WIDTH), np.float32))


def load(rows: RowStore, keys: Any) -> None:
    keys = np.unique(np.asarray(keys, np.int64))
    rows.load({"keys": keys, "values": np.full((len(keys), WIDTH), 7, np.float32)})


changes = st.lists(
    st.tuples(st.sampled_from([push, load]), st.lists(st.integers(0, 60), min_size=1, max_size=20)),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(changes, changes, st.integers(1, 40))
def test_a_snapshot_stays_as_it_was_while_the_table_changes(before, after, block):
    """Also where rows are evicted, others moved to their places, and new ones made."""
    rows = a_table(30, eviction=Eviction(max_age=2, every=1))
    for change, keys in before:
        change(rows, keys)
    for _ in range(2):
        expected, snapshot = copied(rows), rows.begin_snapshot()
        half = len(snapshot.arrays["keys"]) // 2
        first = np.empty((half, WIDTH), np.float32)
        snapshot.read("values", 0, half, first)
        for change, keys in after:
            change(rows, keys)
        np.testing.assert_array_equal(first, expected["values"][:half])
        for kind, values in expected.items():
            np.testing.assert_array_equal(read(snapshot, kind, block), values)
        rows.end_snapshot()


def test_reader_and_writer_do_not_wait_for_each_other():
    """A thread reads while this one changes rows, at its own pace."""
    rows, rng = a_table(20_000), np.random.default_rng(0)
    for _ in range(5):
        expected, snapshot = copied(rows), rows.begin_snapshot()
        found: dict[str, Any] = {}
        pushed = threading.Event()

        def write(
            snapshot: TableSnapshot = snapshot, found: dict[str, Any] = found, go: Any = pushed
        ) -> None:
            assert go.wait(DEADLINE)
            found.update({kind: read(snapshot, kind, 100) for kind in snapshot.arrays})

        thread = threading.Thread(target=write)
        thread.start()
        while thread.is_alive():
            push(rows, rng.integers(0, 25_000, 500))
            pushed.set()
        rows.end_snapshot()
        for kind, values in expected.items():
            np.testing.assert_array_equal(found[kind], values)


def test_rows_are_saved_once_and_only_while_they_are_read():
    rows = a_table(100)
    snapshot = rows.begin_snapshot()
    values = SnapshotArray(snapshot, "values")
    for _ in range(3):
        push(rows, [1, 2, 3])
    assert {kind: log.rows for kind, log in snapshot._log.items()} == dict.fromkeys(snapshot.arrays, 3)
    values.read(0, 100, np.empty((100, WIDTH), np.float32))
    push(rows, [3, 4])
    assert snapshot._log["values"].rows == 3
    assert snapshot._log["keys"].rows == 4


def test_numbers_of_the_log_restart_before_they_overflow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_on_write, "_MAX_NUMBER", 40)
    rows = a_table(10)
    for turn in range(8):
        expected, snapshot = copied(rows), rows.begin_snapshot()
        push(rows, np.arange(turn % 3, 10))
        np.testing.assert_array_equal(read(snapshot, "values", 4), expected["values"])
        rows.end_snapshot()


def test_without_memory_the_checkpoint_fails_and_not_the_training():
    values = np.zeros((4096, WIDTH), np.float32)
    snapshot = TableSnapshot({"values": values}, SavedRowIndex(), limit=100 * WIDTH * 4)
    snapshot.save(np.arange(100))
    snapshot.save(np.arange(101))
    snapshot.save(np.arange(102))
    with pytest.raises(CheckpointError, match="don't fit"):
        read(snapshot, "values", 10)
