"""What a process remembers of paths."""

from __future__ import annotations

import pytest

from insitu.cluster.files import task_client
from insitu.cluster.files.task_client import KnownPaths
from insitu.cluster.files.waiting_changes import MAKE, PUBLISH, REMOVE, RENAME, WaitingChange
from insitu.grid.shared_files import Entry

ENTRY = Entry(0, 0.0)


def test_what_was_asked_for_and_changed_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownPaths()
    assert known.find("v", "a") is None
    known.note("v", "none", (None, None))
    known.record_change(WaitingChange(PUBLISH, "v", "d/e/a", 0.0), ENTRY)
    known.record_change(WaitingChange(MAKE, "v", "m", 0.0))
    assert known.find("v", "none") == (None, None) and known.find("w", "none") is None
    assert known.find("v", "d/e/a") == (ENTRY, "file") and known.find("v", "m") == (None, "folder")
    assert known.find("v", "d/e") == known.find("v", "d") == (None, "folder")
    known.record_change(WaitingChange(RENAME, "v", "d/e", 0.0, target="m"))
    assert known.find("v", "d/e") == (None, None) and known.find("v", "d/e/a") is None
    assert known.find("v", "m") is None and known.find("v", "d") == (None, "folder")
    known.record_change(WaitingChange(REMOVE, "v", "d", 0.0))
    assert known.find("v", "d") == (None, None) and known.find("v", "d/e") is None
    monkeypatch.setattr(task_client, "_MOST", 2)
    known.note("v", "x", (None, None))
    assert known.find("v", "none") is None and known.find("v", "d") is not None
