"""The copy of the catalogue that each agent keeps: read as any catalogue, and never changed.

The head's file is sent whole after each change, and put in place by a rename. A mark in the file's header
distinguishes a copy from a catalogue of its own.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time

from insitu.base.disk.access import file_mode, make_folder
from insitu.base.disk.durable import replace_file
from insitu.base.errors import CorruptCatalog, GridError
from insitu.base.paths import Paths

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_MARK_AT = 68
"""Offset of the id of the application in SQLite's header."""
_MARK = b"insC"
_BUSY_SECONDS = 60.0
_TICK = 50_000_000
"""Nanoseconds, more than a tick of a file system's clock, in which two changes may have the same time."""


def is_catalog_copy(paths: Paths) -> bool:
    """Return whether the catalogue of this home is a copy of the head's. False if it can't be read.

    SQLite reads the mark: POSIX ends all locks of a process on a file as soon as the process closes the file
    once, so a file of a database that other threads use must not be opened past SQLite
    (https://www.sqlite.org/howtocorrupt.html, 2.2).
    """
    if not paths.catalog.exists():
        return False
    try:
        uri = f"{paths.catalog.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)) as database:
            return _is_marked(database)
    except sqlite3.Error:
        return False


def _is_marked(database: sqlite3.Connection) -> bool:
    (mark,) = database.execute("PRAGMA application_id").fetchone()
    return int(mark) == int.from_bytes(_MARK, "big")


def refuse_copy(paths: Paths) -> None:
    """Raise GridError if the catalogue of this home is a copy, which must not be changed here."""
    if is_catalog_copy(paths):
        raise _make_refusal(paths)


def refuse_change(paths: Paths, database: sqlite3.Connection) -> None:
    """Raise GridError, in a transaction, if the catalogue has become a copy meanwhile."""
    if _is_marked(database):
        raise _make_refusal(paths)


def _make_refusal(paths: Paths) -> GridError:
    return GridError(
        f"The head alone changes the catalogue. Received: a change to the copy in {paths.home}. Run the "
        f"command on the machine of the head"
    )


def install_catalog_copy(paths: Paths, data: bytes) -> None:
    """Put the head's catalogue in the place of this home's copy. Raises GridError, OSError."""
    if len(data) < _HEADER_BYTES or not data.startswith(_MAGIC):
        raise GridError(f"A catalogue is a file of SQLite. Received: {len(data)} bytes of something else")
    make_folder(paths.home, paths.home)
    # Leftovers of an interrupted change of another file would be taken for part of this one.
    paths.catalog_journal.unlink(missing_ok=True)
    marked = data[:_MARK_AT] + _MARK + data[_MARK_AT + len(_MARK) :]
    replace_file(paths.catalog, marked, sync=True, mode=file_mode(paths.home))


def drop_copy(paths: Paths) -> None:
    """Remove the copy of this home, if it has one. Raises OSError."""
    if is_catalog_copy(paths):
        paths.catalog.unlink()
        paths.catalog_journal.unlink(missing_ok=True)


def disown_catalog(paths: Paths) -> None:
    """Make the catalogue of this home a copy, in a transaction: another head has replaced its own. Raises
    GridError."""
    if not paths.catalog.exists():
        return
    try:
        with contextlib.closing(
            sqlite3.connect(paths.catalog, isolation_level=None, timeout=_BUSY_SECONDS)
        ) as database:
            database.execute("PRAGMA synchronous = EXTRA")
            database.execute(f"PRAGMA application_id = {int.from_bytes(_MARK, 'big')}")
    except sqlite3.Error as error:
        raise GridError(f"The catalogue at {paths.catalog} can't be changed ({error})") from error


class CatalogWatch:
    """Reads the catalogue of this home after each change."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._seen: tuple[int, int, int] | None = None
        #: The file as it was last read; None: there is none.
        self.data: bytes | None = None

    def poll(self) -> bool:
        """Return whether `data` is new. Raises CorruptCatalog if the file can't be read."""
        try:
            found = self._paths.catalog.stat()
        except OSError:
            return False
        now = (found.st_ino, found.st_size, found.st_mtime_ns)
        if now == self._seen:
            return False
        self._seen = now  # a damaged one is named once
        before, self.data = self.data, self._read()
        if time.time_ns() - found.st_mtime_ns < _TICK:
            self._seen = None
        return self.data != before

    def _read(self) -> bytes:
        try:
            with contextlib.closing(sqlite3.connect(self._paths.catalog, isolation_level=None)) as database:
                # Holds off writers until the whole file is read.
                database.execute("BEGIN")
                database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                return database.serialize()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise CorruptCatalog(
                f"The catalogue at {self._paths.catalog} can't be read ({error}). `insitu repair` makes a "
                f"new one from what is in the stores"
            ) from error
