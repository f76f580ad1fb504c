"""Keeps a job's journal: every event, what was decided, and the state that followed, in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import is_missing, read_file_size_limit
from insitu.base.errors import ClusterError, InputError
from insitu.cluster.decide import (
    Action,
    Event,
    JobState,
    decode_job,
    encode_action,
    encode_event,
    encode_job,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    sequence INTEGER PRIMARY KEY,
    at REAL NOT NULL,       -- seconds since 1970
    event TEXT NOT NULL,    -- {"event": NAME, ...}
    actions TEXT NOT NULL,  -- [{"action": NAME, ...}, ...]
    state TEXT NOT NULL     -- encode_job()
);
PRAGMA user_version = 1;
"""

_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, InputError)
"""Errors that decoding raises for an entry that this version of insitu hasn't written."""
_PAGE_BYTES = 4096
"""Bytes by which an SQLite file grows."""
_PRIMARY_CODE = 0xFF
"""The bits of an SQLite error code that name its kind; the others say more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and the actions that it led to."""

    #: When it was recorded, in seconds since 1970.
    at: float
    #: The event, as `encode_event` has it.
    event: dict[str, Any]
    #: The actions, as `encode_action` has them.
    actions: list[dict[str, Any]]


class Journal:
    """One job's journal.

    Only the job's controller writes; any process may read meanwhile. Raises ClusterError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self, mode: str) -> Iterator[sqlite3.Connection]:
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            with closing(sqlite3.connect(uri, uri=True, timeout=30.0)) as connection:
                # With FULL, SQLite's default, a power cut may undo the last entry after it was acted upon.
                connection.execute("PRAGMA synchronous = EXTRA")
                yield connection
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if mode != "rwc" and is_missing(self.path):
                raise ClusterError(
                    f"{self.path.parent} holds no job: it has no {self.path.name}. Delete the folder"
                ) from error
            raise ClusterError(
                f"The job's journal can't be used: {error}. Where the disk is full free some space; a "
                "journal that is damaged can't be repaired, so start a new job",
                logs=str(self.path),
            ) from error

    def create(self, state: JobState) -> None:
        """Make the journal, with `state` as its first entry."""
        with self._open("rwc") as connection:
            connection.executescript(_SCHEMA)
            self._insert(connection, 0.0, {"event": "Created"}, [], state)

    def record(self, at: float, event: Event, actions: Sequence[Action], state: JobState) -> None:
        """Append an event and what followed, in one transaction: all of it is on disk, or nothing."""
        acts = [encode_action(action) for action in actions]
        with self._open("rw") as connection:
            self._insert(connection, at, encode_event(event), acts, state)

    @staticmethod
    def _insert(
        connection: sqlite3.Connection,
        at: float,
        event: dict[str, Any],
        actions: list[dict[str, Any]],
        state: JobState,
    ) -> None:
        values = (at, json.dumps(event), json.dumps(actions), json.dumps(encode_job(state)))
        with connection:
            connection.execute("INSERT INTO entries (at, event, actions, state) VALUES (?, ?, ?, ?)", values)

    def _select(self, query: str, *parameters: str | int) -> list[Any]:
        try:
            with self._open("ro") as connection:
                return connection.execute(query, parameters).fetchall()
        except ClusterError as error:
            code = getattr(error.__cause__, "sqlite_errorcode", 0)
            if code & _PRIMARY_CODE != sqlite3.SQLITE_READONLY:
                raise
        # A controller was killed in the middle of a transaction, which only a writer can roll back.
        with self._open("rw") as connection:
            return connection.execute(query, parameters).fetchall()

    def state(self) -> JobState:
        """Return the latest state."""
        return self.last()[1]

    def last(self) -> tuple[float, JobState]:
        """Return when the last entry was recorded, in seconds since 1970 (0 before the first event), and the
        state since."""
        rows = self._select("SELECT at, state FROM entries ORDER BY sequence DESC LIMIT 1")
        if not rows:
            raise ClusterError(
                "The job's journal is empty: it was never started. Start a new job", logs=str(self.path)
            )
        try:
            return float(rows[0][0]), decode_job(json.loads(rows[0][1]))
        except _DAMAGED as error:
            raise ClusterError(
                f"The job's journal holds no state of this version of insitu: {error}. Use the version that "
                "started the job, or start a new job",
                logs=str(self.path),
            ) from error

    def is_at_limit(self) -> bool:
        """Return whether the journal may not grow (`ulimit -f`), so that waiting for room is in vain."""
        limit = read_file_size_limit()
        return limit is not None and self.path.stat().st_size + _PAGE_BYTES > limit

    def find_reply(self, token: str) -> dict[str, Any] | None:
        """Return the `Reply` to the request `token` as a JSON object, or None if there is none."""
        query = "SELECT actions FROM entries WHERE instr(actions, ?) ORDER BY sequence DESC"
        rows = self._select(query, json.dumps(token))
        try:
            actions = [action for (text,) in rows for action in json.loads(text)]
            return next((a for a in actions if a["action"] == "Reply" and a["token"] == token), None)
        except _DAMAGED as error:
            raise self._make_damaged_error(error) from error

    def last_sequence(self) -> int:
        """Return the number of the last entry, counted from 1."""
        ((found,),) = self._select("SELECT coalesce(max(sequence), 0) FROM entries")
        return int(found)

    def rows_after(self, sequence: int, most: int) -> list[list[Any]]:
        """Return the rows of at most so many entries after the one with this number, for `append_rows`."""
        query = "SELECT sequence, at, event, actions, state FROM entries WHERE sequence > ? ORDER BY sequence"
        return [list(row) for row in self._select(f"{query} LIMIT ?", sequence, most)]

    def append_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append entries of another journal to this one, which is its copy and is made on first use.

        Entries that are here already are left as they are. Raises ClusterError for what is no row, or doesn't
        follow the last entry.
        """
        for row in rows:
            if [type(each) for each in row] != [int, float, str, str, str]:
                raise ClusterError(f"An entry of a journal has five values. Received: {row!r:.100}")
        with self._open("rwc") as connection:
            connection.executescript(_SCHEMA)
            with connection:
                for row in rows:
                    ((last,),) = connection.execute("SELECT coalesce(max(sequence), 0) FROM entries")
                    if row[0] > last + 1:
                        raise ClusterError(
                            f"Entry {row[0]} of a journal follows {row[0] - 1}. Received: {last}"
                        )
                    connection.execute("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)", tuple(row))

    def entries(self) -> list[Entry]:
        """Return everything that happened, in order."""
        rows = self._select("SELECT at, event, actions FROM entries ORDER BY sequence")
        try:
            return [Entry(at, json.loads(event), json.loads(actions)) for at, event, actions in rows]
        except _DAMAGED as error:
            raise self._make_damaged_error(error) from error

    def _make_damaged_error(self, error: Exception) -> ClusterError:
        return ClusterError(
            f"An entry of the job's journal is damaged: {error}. It can't be repaired; start a new job",
            logs=str(self.path),
        )
