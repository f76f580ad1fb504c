"""The table of names of one node's store: entries of volumes, in SQLite.

Several processes may use it. Each change is one transaction, so a tree is renamed as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from insitu.access import make_file, make_folder
from insitu.errors import GridError
from insitu.grid.shared_files.entries import DELETED, FILE, FOLDER, Entry, parse_entry

_WAIT_SECONDS = 30.0
KEEP_DELETED_SECONDS = 30 * 86400.0
"""Seconds for which is known what was deleted. A node that returns later brings it back."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    volume TEXT NOT NULL, path TEXT NOT NULL, stamp INTEGER NOT NULL, writer TEXT NOT NULL,
    kind TEXT NOT NULL, modified REAL NOT NULL, copies INTEGER NOT NULL, size INTEGER NOT NULL,
    blocks TEXT NOT NULL, PRIMARY KEY (volume, path)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_stamp ON entries (volume, stamp);
"""
_COLUMNS = "path, stamp, writer, kind, modified, copies, blocks"


@dataclass(frozen=True, slots=True)
class ListedPath:
    """One line of a listing."""

    #: The path in its volume.
    path: str
    #: FILE or FOLDER. A folder is there when it was made, or when something is in it.
    kind: str
    #: Bytes of a file; 0 of a folder.
    size: int
    #: When it was changed, in seconds since 1970; 0 of a folder that wasn't made.
    modified: float
    #: On how many nodes a file is to lie.
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Commit:
    """What one change has done."""

    #: The entries that are new. None: it was done before.
    entries: tuple[Entry, ...] = ()
    #: The keys of blocks that no entry has any more.
    dropped: tuple[str, ...] = ()


class NameTable:
    """The names that one store knows. Paths are checked by the caller.

    Methods that change something raise OSError with the `errno` that Linux has for it: ENOENT, EEXIST,
    EISDIR, ENOTDIR, ENOTEMPTY, and ESTALE where another commit came between.
    """

    def __init__(self, home: Path, path: Path) -> None:
        self._home = home
        self._path = path
        self._lock = threading.Lock()
        #: The connection, and the process and file that it belongs to. Written under the lock.
        self._database: sqlite3.Connection | None = None
        self._identity = (0, 0, 0)

    @contextlib.contextmanager
    def _open(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """Yield a connection within a transaction. Raises GridError where the table can't be used."""
        with self._lock:
            try:
                database = self._connect()
                database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield database
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
                database.execute("COMMIT")
            except sqlite3.Error as error:
                raise GridError(
                    f"The names of insitu:// must be readable. Received: {self._path} ({error}). Move that "
                    f"file away: the names come again from other nodes"
                ) from error

    def _connect(self) -> sqlite3.Connection:
        """Return the connection of this process, which is kept: closing it would write the disk each time."""
        try:
            found = os.stat(self._path)
            identity = os.getpid(), found.st_dev, found.st_ino
        except FileNotFoundError:
            make_folder(self._home, self._path.parent)
            make_file(self._home, self._path)
            identity = (0, 0, 0)
        if self._database is not None and identity == self._identity:
            return self._database
        if self._database is not None and self._identity[0] == os.getpid():
            self._database.close()  # not that of the process that forked this one
        database = sqlite3.connect(
            self._path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        if not database.execute("PRAGMA user_version").fetchone()[0]:
            database.execute("PRAGMA journal_mode=WAL")
            database.executescript(_SCHEMA)
            database.execute("PRAGMA user_version=1")
        database.execute("PRAGMA synchronous=NORMAL")
        found = os.stat(self._path)
        self._database, self._identity = database, (os.getpid(), found.st_dev, found.st_ino)
        return database

    @property
    def identity(self) -> tuple[int, ...]:
        """Tell this table from another one that comes into its place."""
        with self._lock:
            self._connect()
            return self._identity

    def close(self) -> None:
        """Close the connection. The next call opens it."""
        with self._lock:
            if self._database is not None and self._identity[0] == os.getpid():
                self._database.close()
            self._database = None

    # Reading

    def find(self, volume: str, path: str) -> Entry | None:
        """Return the entry of a file or of a folder that was made; None: there is none, or it is deleted."""
        with self._open() as database:
            found = _read(database, volume, path)
        return None if found is None or found.kind == DELETED else found

    def describe(self, volume: str, path: str) -> ListedPath | None:
        """Return what a path is; None: there is nothing."""
        with self._open() as database:
            found = _read(database, volume, path) if path else None
            if found is not None and found.kind != DELETED:
                return ListedPath(path, found.kind, found.size, found.modified)
            return ListedPath(path, FOLDER, 0, 0.0) if _has_children(database, volume, path) else None

    def list_below(self, volume: str, path: str, after: str, limit: int) -> list[Entry]:
        """Return up to `limit` files and made folders below `path` whose paths come after `after`, in their
        order."""
        low, high = _range(path)
        with self._open() as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE volume = ? AND path > ? AND path >= ? AND path < ? "
                f"AND kind != '{DELETED}' ORDER BY path LIMIT ?",
                (volume, after, low, high, limit),
            )
            return [_make(row) for row in rows]

    def list_children(self, volume: str, path: str) -> list[ListedPath]:
        """Return what lies directly in a folder, in order; nothing for what is none."""
        low, high = _range(path)
        start = len(low) + 1
        with self._open() as database:
            rows = database.execute(
                "SELECT path, kind, size, modified, copies FROM entries "
                f"WHERE volume = ? AND path >= ? AND path < ? "
                f"AND kind != '{DELETED}' AND instr(substr(path, {start}), '/') = 0",
                (volume, low, high),
            )
            found = {row[0]: ListedPath(*row) for row in rows}
            folders = database.execute(
                f"SELECT DISTINCT substr(path, 1, {len(low)} + instr(substr(path, {start}), '/') - 1) "
                f"FROM entries WHERE volume = ? AND path >= ? AND path < ? AND kind != '{DELETED}' "
                f"AND instr(substr(path, {start}), '/') > 0",
                (volume, low, high),
            )
            for (folder,) in folders:
                found.setdefault(folder, ListedPath(folder, FOLDER, 0, 0.0))
        return [found[name] for name in sorted(found)]

    def list_volumes(self) -> list[str]:
        """Return the volumes that hold something."""
        with self._open() as database:
            rows = database.execute(f"SELECT DISTINCT volume FROM entries WHERE kind != '{DELETED}'")
            return sorted(row[0] for row in rows)

    def read_states(self) -> dict[str, tuple[int, str]]:
        """Return the newest stamp and a digest of all entries, by volume. Equal digests: the same names."""
        digests: dict[str, tuple[int, Any]] = {}
        with self._open() as database:
            rows = database.execute("SELECT volume, path, stamp, writer FROM entries ORDER BY volume, path")
            for volume, path, stamp, writer in rows:
                newest, digest = digests.get(volume) or (0, xxhash.xxh3_128())
                digest.update(f"{path}\0{stamp}\0{writer}\0".encode())
                digests[volume] = max(newest, stamp), digest
        return {volume: (newest, digest.hexdigest()) for volume, (newest, digest) in digests.items()}

    def read_newest(self, volume: str) -> int:
        """Return the newest stamp of a volume; 0: nothing was committed."""
        with self._open() as database:
            return _newest(database, volume)

    def export(self, volume: str, after: str, limit: int) -> list[Entry]:
        """Return up to `limit` entries, deleted ones too, whose paths come after `after`."""
        with self._open() as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE volume = ? AND path > ? ORDER BY path LIMIT ?",
                (volume, after, limit),
            )
            return [_make(row) for row in rows]

    def list_files(self, volume: str) -> list[Entry]:
        """Return all files of a volume."""
        with self._open() as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE volume = ? AND kind = '{FILE}'", (volume,)
            )
            return [_make(row) for row in rows]

    # Changing

    def merge(self, volume: str, entries: Iterable[Entry]) -> int:
        """Take what another node has committed, where it is newer. Return how many entries have changed."""
        changed = 0
        with self._open(write=True) as database:
            for entry in entries:
                known = _read(database, volume, entry.path)
                if known is None or known.order < entry.order:
                    _write(database, volume, entry)
                    changed += 1
        return changed

    def publish(self, volume: str, entry: Entry, expected: int | None, writer: str) -> Commit:
        """Put a file at its path, in the place of the one that is there. Return what that has done.

        `expected` is the stamp of the one that is there, 0: none; None: any. A second call for the same
        blocks changes nothing.
        """
        with self._open(write=True) as database:
            known = _read(database, volume, entry.path)
            known = None if known is None or known.kind == DELETED else known
            if known is not None and known.blocks == entry.blocks and known.kind == FILE and entry.blocks:
                return Commit((known,))
            _check_place(database, volume, entry.path)
            if expected is not None and expected != (0 if known is None else known.stamp):
                what = "there is a file" if expected == 0 else "another process has changed it"
                raise _error(errno.EEXIST if expected == 0 else errno.ESTALE, entry.path, what)
            return self._commit(database, volume, [entry], writer)

    def make_folder(self, volume: str, path: str, writer: str) -> Commit:
        """Make a folder, which then exists without anything in it. Return what has changed."""
        with self._open(write=True) as database:
            known = _read(database, volume, path)
            if known is not None and known.kind == FOLDER:
                return Commit()
            _check_parents(database, volume, path)
            if known is not None and known.kind == FILE:
                raise _error(errno.EEXIST, path, "it is a file")
            return self._commit(database, volume, [Entry(path, 0, "", FOLDER, time.time())], writer)

    def remove(self, volume: str, path: str, *, recursive: bool, writer: str) -> Commit:
        """Remove a file or a folder. Return what has changed."""
        with self._open(write=True) as database:
            below = _children(database, volume, path)
            known = _read(database, volume, path) if path else None
            known = None if known is None or known.kind == DELETED else known
            if known is None and not below:
                raise _error(errno.ENOENT, path)
            if below and not recursive:
                raise _error(errno.ENOTEMPTY, path)
            removed = [*([known] if known else []), *below]
            now = time.time()
            return self._commit(
                database, volume, [Entry(e.path, 0, "", DELETED, now) for e in removed], writer
            )

    def rename(self, volume: str, source: str, target: str, writer: str) -> Commit:
        """Move a file, which replaces one at `target`, or a folder with all in it, to a place that is free.

        Return what that has done.
        """
        with self._open(write=True) as database:
            below = _children(database, volume, source)
            known = _read(database, volume, source)
            known = None if known is None or known.kind == DELETED else known
            if known is None and not below:
                raise _error(errno.ENOENT, source)
            if source == target:
                return Commit()
            if f"{target}/".startswith(f"{source}/"):
                raise _error(errno.EINVAL, target, "it lies in what is moved")
            there = _read(database, volume, target)
            if below or (known is not None and known.kind == FOLDER):
                if there is not None and there.kind == FILE:
                    raise _error(errno.ENOTDIR, target)
                if _has_children(database, volume, target):
                    raise _error(errno.ENOTEMPTY, target)
                _check_parents(database, volume, target)
            else:
                _check_place(database, volume, target)
            moved = [*([known] if known else []), *below]
            new = [
                Entry(target + e.path[len(source) :], 0, "", e.kind, e.modified, e.copies, e.blocks)
                for e in moved
            ]
            now = time.time()
            old = [Entry(e.path, 0, "", DELETED, now) for e in moved]
            return self._commit(database, volume, [*old, *new], writer)

    def _commit(self, database: sqlite3.Connection, volume: str, entries: list[Entry], writer: str) -> Commit:
        stamp = _newest(database, volume) + 1
        done = [Entry(e.path, stamp, writer, e.kind, e.modified, e.copies, e.blocks) for e in entries]
        kept = {block.key for entry in done for block in entry.blocks}
        dropped = set()
        for entry in done:
            before = _read(database, volume, entry.path)
            dropped |= set() if before is None else {block.key for block in before.blocks}
            _write(database, volume, entry)
        return Commit(tuple(done), tuple(sorted(dropped - kept)))

    def forget_deleted(self, before: float) -> int:
        """Forget what was deleted before a time. Return how many entries that were."""
        with self._open(write=True) as database:
            return database.execute(
                f"DELETE FROM entries WHERE kind = '{DELETED}' AND modified < ?", (before,)
            ).rowcount


def _error(number: int, path: str, why: str = "") -> OSError:
    return OSError(number, f"{os.strerror(number)}{f': {why}' if why else ''}", path)


def _range(path: str) -> tuple[str, str]:
    """Return the bounds of the paths below a folder: from the first, up to the second."""
    return (f"{path}/", f"{path}0") if path else ("", "\U0010ffff")  # 0 comes after /


def _make(row: tuple[Any, ...]) -> Entry:
    *fields, blocks = row
    return parse_entry([*fields, json.loads(blocks)])


def _read(database: sqlite3.Connection, volume: str, path: str) -> Entry | None:
    row = database.execute(
        f"SELECT {_COLUMNS} FROM entries WHERE volume = ? AND path = ?", (volume, path)
    ).fetchone()
    return None if row is None else _make(row)


def _write(database: sqlite3.Connection, volume: str, entry: Entry) -> None:
    *fields, blocks = entry.to_json()
    database.execute(
        f"INSERT OR REPLACE INTO entries (volume, size, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (volume, entry.size, *fields, json.dumps(blocks)),
    )


def _newest(database: sqlite3.Connection, volume: str) -> int:
    found = database.execute("SELECT MAX(stamp) FROM entries WHERE volume = ?", (volume,)).fetchone()[0]
    return int(found or 0)


def _children(database: sqlite3.Connection, volume: str, path: str) -> list[Entry]:
    rows = database.execute(
        f"SELECT {_COLUMNS} FROM entries WHERE volume = ? AND path >= ? AND path < ? AND kind != '{DELETED}'",
        (volume, *_range(path)),
    )
    return [_make(row) for row in rows]


def _has_children(database: sqlite3.Connection, volume: str, path: str) -> bool:
    row = database.execute(
        f"SELECT 1 FROM entries WHERE volume = ? AND path >= ? AND path < ? AND kind != '{DELETED}' LIMIT 1",
        (volume, *_range(path)),
    ).fetchone()
    return row is not None


def _check_parents(database: sqlite3.Connection, volume: str, path: str) -> None:
    """Raise NotADirectoryError where a file is in the place of a folder above `path`."""
    names = path.split("/")[:-1]
    for count in range(1, len(names) + 1):
        parent = "/".join(names[:count])
        found = _read(database, volume, parent)
        if found is not None and found.kind == FILE:
            raise _error(errno.ENOTDIR, parent)


def _check_place(database: sqlite3.Connection, volume: str, path: str) -> None:
    """Raise IsADirectoryError or NotADirectoryError where no file can be at `path`."""
    _check_parents(database, volume, path)
    found = _read(database, volume, path)
    if (found is not None and found.kind == FOLDER) or _has_children(database, volume, path):
        raise _error(errno.EISDIR, path)
