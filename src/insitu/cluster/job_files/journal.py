"""The account of a job: every event, what was decided, and the state that followed, in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.cluster.decide import (
    Action,
    Event,
    JobState,
    decode_job,
    encode_action,
    encode_event,
    encode_job,
)
from insitu.errors import ClusterError

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


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and the actions that it led to, as JSON objects. `at` is in seconds since 1970."""

    at: float
    event: dict[str, Any]
    actions: list[dict[str, Any]]


class Journal:
    """Only the job's controller writes; anybody may read meanwhile. Raises ClusterError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self, mode: str) -> Iterator[sqlite3.Connection]:
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            with closing(sqlite3.connect(uri, uri=True, timeout=30.0)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise ClusterError(f"The job's journal can't be used: {error}", logs=str(self.path)) from error

    def create(self, state: JobState) -> None:
        """Makes the journal, with `state` as its first entry."""
        with self._open("rwc") as connection:
            connection.executescript(_SCHEMA)
            self._insert(connection, 0.0, {"event": "Created"}, [], state)

    def record(self, at: float, event: Event, actions: Sequence[Action], state: JobState) -> None:
        """One transaction: all of it is on disk, or nothing."""
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

    def state(self) -> JobState:
        """The latest state."""
        with self._open("ro") as connection:
            row = connection.execute("SELECT state FROM entries ORDER BY sequence DESC LIMIT 1").fetchone()
        if row is None:
            raise ClusterError("The job's journal is empty", logs=str(self.path))
        return decode_job(json.loads(row[0]))

    def find_reply(self, token: str) -> dict[str, Any] | None:
        """The `Reply` to the request `token` as a JSON object, or None where there is none."""
        query = "SELECT actions FROM entries WHERE instr(actions, ?) ORDER BY sequence DESC"
        with self._open("ro") as connection:
            rows = connection.execute(query, (json.dumps(token),)).fetchall()
        actions = [action for (text,) in rows for action in json.loads(text)]
        return next((a for a in actions if a["action"] == "Reply" and a["token"] == token), None)

    def entries(self) -> list[Entry]:
        """Everything that happened, in order."""
        with self._open("ro") as connection:
            rows = connection.execute("SELECT at, event, actions FROM entries ORDER BY sequence").fetchall()
        return [Entry(at, json.loads(event), json.loads(actions)) for at, event, actions in rows]
