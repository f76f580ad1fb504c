"""The account of a job on disk."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.decide.events import (
    SubmittedEvent,
    TaskExitedEvent,
)
from insitu.cluster.decide.job import advance, new_job
from insitu.cluster.job_files.journal import Journal

W0 = TaskId("worker", 0)


def test_the_journal_tells_every_event_and_the_last_state(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    state = new_job([TaskSpec(W0, NodeId("node-0"))], 1)
    journal.create(state)
    for at, event in enumerate((SubmittedEvent(), TaskExitedEvent(W0, -9, progress=(0, 1)))):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    assert Journal(journal.path).state() == state
    created, submitted, exited = journal.entries()
    assert created.event == {"event": "Created"}
    assert submitted.actions == [
        {"action": "Publish", "generation": 1},
        {"action": "Launch", "tasks": ["worker:0"]},
    ]
    assert exited.event["task"] == "worker:0" and exited.event["code"] == -9


@pytest.mark.parametrize("content", [None, b"no database at all, but long enough to look at"])
def test_a_journal_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "journal.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ClusterError, match="journal"):
        Journal(path).state()
    assert path.exists() == (content is not None)


KILLED_WHILE_IT_WRITES = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN")
for number in range(200):
    connection.execute("UPDATE entries SET state = state || ?", (" " * 10_000,))
os.kill(os.getpid(), 9)
"""


def test_a_journal_whose_writer_was_killed_in_the_middle_can_be_read(tmp_path: Path) -> None:
    """What the transaction has written already is undone, though readers open the file for reading alone."""
    journal = Journal(tmp_path / "journal.sqlite")
    state = new_job([TaskSpec(W0, NodeId("node-0"))], 1)
    journal.create(state)
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, journal.path])
    assert done.returncode == -signal.SIGKILL and os.path.getsize(f"{journal.path}-journal") > 0
    assert journal.state() == state
    assert [entry.event for entry in journal.entries()] == [{"event": "Created"}]


def test_a_folder_without_a_journal_holds_no_job(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        Journal(tmp_path / "journal.sqlite").state()
    assert str(caught.value) == f"{tmp_path} holds no job: it has no journal.sqlite. Delete the folder"


@pytest.mark.parametrize("text", ["[]", "7", '{"tasks": 5}', '{"tasks": [[]]}', "{}", "[" * 100_000, '"x"'])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    """Whatever it holds: another exception would end each of the job's controllers."""
    journal = Journal(tmp_path / "journal.sqlite")
    journal.create(new_job([TaskSpec(W0, NodeId("node-0"))], 1))
    with closing(sqlite3.connect(journal.path)) as connection, connection:
        connection.execute("UPDATE entries SET state = ?, actions = ?", (text, text + "t0"))
    with pytest.raises(ClusterError, match="holds no state of this version"):
        journal.state()
    with pytest.raises(ClusterError, match="is damaged"):
        journal.entries()


def test_an_entry_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.create(new_job([TaskSpec(W0, NodeId("node-0"))], 1))
    with journal._open("rw") as connection:
        # EXTRA: the end of the transaction itself is synced, too.
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)


def test_a_copy_gets_the_entries_that_it_lacks_and_has_the_same_state(tmp_path: Path) -> None:
    journal, copy = Journal(tmp_path / "journal.sqlite"), Journal(tmp_path / "copy.sqlite")
    state = new_job([TaskSpec(W0, NodeId("node-0"))], 1)
    journal.create(state)
    copy.append_rows(journal.rows_after(0, 10))
    for at, event in enumerate((SubmittedEvent(), TaskExitedEvent(W0, -9, progress=(0, 1)))):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    assert copy.last_sequence() == 1 and journal.last_sequence() == 3
    assert len(journal.rows_after(1, 1)) == 1
    with pytest.raises(ClusterError, match=r"Entry 3 of a journal follows 2\. Received: 1"):
        copy.append_rows(journal.rows_after(2, 10))
    copy.append_rows(journal.rows_after(0, 10))  # what it has is left as it is
    copy.append_rows([])
    assert copy.state() == state and copy.entries() == journal.entries()


@pytest.mark.parametrize(
    "row", [[1, 0.0, "{}", "[]"], ["1", 0.0, "{}", "[]", "{}"], [1, 0, "{}", "[]", None]]
)
def test_what_is_no_entry_is_not_appended(tmp_path: Path, row: list[object]) -> None:
    copy = Journal(tmp_path / "copy.sqlite")
    with pytest.raises(ClusterError, match="An entry of a journal has five values"):
        copy.append_rows([row])
    assert not copy.path.exists()
