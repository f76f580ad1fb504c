"""The embedded store: one SQLite file, for the processes and threads of one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from insitu.base.disk.durable import NO_ROOM, STAGING, sync_folder
from insitu.base.errors import (
    CorruptMetadata,
    InputError,
    LeaseEnded,
    MetadataError,
    MetadataRefused,
    RevisionCompacted,
    StorageFull,
    StoreUnavailable,
)
from insitu.metadata.interface import (
    IDLE_SECONDS,
    Change,
    Compare,
    Operation,
    Outcome,
    Put,
    Record,
    check_lease_seconds,
    check_limit,
    check_transaction,
    encode_key,
    encode_text,
    find_deadline,
    find_end,
)

_REMEMBERED_SECONDS = 600.0
"""How long a transaction's id is known."""
_LOG_BYTES, _CHANGE_BYTES = 64 << 20, 1 << 10
"""Bytes of changes that are kept for watches, and what a change counts for beside its key and value: so it is
up to 65,536 of them."""
_POLL_SECONDS = 0.1
"""How often a watch looks for changes of other processes. Those of its own wake it."""
_of_parents: list[sqlite3.Connection] = []
"""Connections of a process that this one was forked from. To close them would disturb it."""
_COLUMNS = "key, value, revision, lease, crc32"


def read_boot_time() -> float:
    """Return the seconds since this machine was started, also those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_boot_id() -> str:
    """Return an id of this boot of the machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class EmbeddedStore:
    """A `MetadataStore` in the SQLite file at `path`. `clock` and `boot` are for tests."""

    def __init__(
        self,
        path: Path,
        cluster: str,
        *,
        create: bool = False,
        clock: Callable[[], float] = read_boot_time,
        boot: str | None = None,
    ) -> None:
        self._path, self._cluster, self._clock = path, cluster, clock
        self._boot = read_boot_id() if boot is None else boot
        if create:
            create_file(path, cluster, self._boot)
        #: Connections that no call uses, all of the process `_pid`: a forked one has to open its own.
        self._idle: list[sqlite3.Connection] = []
        self._pid = os.getpid()
        #: Held while what follows is read or written; woken after each change of this process.
        self._changed = threading.Condition()
        self._changes_made = 0
        self._closed = threading.Event()
        with translate_errors(path):
            self._idle.append(open_file(path, cluster))
            self._identity = self._identify()

    def get(self, keys: Sequence[str]) -> tuple[dict[str, Record], int]:
        wanted = [encode_key(key) for key in keys]
        with self._reading() as database:
            found = [record for key in wanted if (record := self._find(database, key)) is not None]
            return {record.key: record for record in found}, _read_revision(database)

    def range(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[list[Record], int]:
        check_limit(limit)
        low = encode_text(prefix)
        with self._reading() as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM records WHERE key > ? AND key >= ? AND key < ? ORDER BY key LIMIT ?",
                (encode_text(after), low, find_end(low), limit),
            )
            return [self._make_record(row) for row in rows], _read_revision(database)

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        check_transaction(compare, operations, id)
        try:
            return self._make(compare, operations, id)
        except (StorageFull, MetadataRefused):
            # What was made is looked up without a write, which a full disk refuses.
            with self._transaction("BEGIN") as database:
                if (made := _find_made(database, id)) is not None:
                    return made
            raise

    def _make(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        with self._changing() as database:
            if (made := _find_made(database, id)) is not None:
                return made
            found = {each.key: self._find(database, each.key.encode()) for each in compare}
            if not all(each.holds(found[each.key]) for each in compare):
                records = tuple(record for record in found.values() if record is not None)
                return Outcome(False, _read_revision(database), records)
            for each in operations:
                if isinstance(each, Put) and each.lease:
                    _require_lease(database, each.lease)
            revision = _apply(database, operations)
            database.execute("INSERT INTO transactions VALUES (?, ?, ?)", (id, revision, self._clock()))
            return Outcome(True, revision)

    def list_made(self) -> list[str]:
        with self._reading() as database:
            return [str(id) for (id,) in database.execute("SELECT id FROM transactions")]

    def watch(self, prefix: str, revision: int) -> Iterator[list[Change]]:
        low = encode_text(prefix)
        quiet_since = time.monotonic()
        while True:
            with self._changed:
                if self._closed.is_set():
                    return
                seen = self._changes_made
            try:
                changes, revision = self._read_changes(low, revision)
            except StoreUnavailable:
                if self._closed.is_set():
                    return
                raise
            for _, together in groupby(changes, lambda change: change.revision):
                yield list(together)
                quiet_since = time.monotonic()
            if time.monotonic() - quiet_since >= IDLE_SECONDS:
                yield []
                quiet_since = time.monotonic()
            with self._changed:
                if not self._closed.is_set() and self._changes_made == seen:
                    self._changed.wait(_POLL_SECONDS)

    def grant(self, seconds: float) -> int:
        check_lease_seconds(seconds)
        with self._changing() as database:
            row = (seconds, self._clock() + seconds)
            return int(
                database.execute("INSERT INTO leases (seconds, ends) VALUES (?, ?)", row).lastrowid or 0
            )

    def keep(self, lease: int) -> bool:
        with self._changing() as database:
            kept = database.execute(
                "UPDATE leases SET ends = ? + seconds WHERE id = ?", (self._clock(), lease)
            )
            return kept.rowcount > 0

    def revoke(self, lease: int) -> None:
        with self._changing() as database:
            _end_lease(database, lease)

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        if self._pid == os.getpid():
            for database in idle:
                database.close()

    # Transactions of SQLite

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one state, in which no lease is alive whose time is over, unless the
        disk takes no change."""
        with self._transaction("BEGIN") as database:
            over = "SELECT EXISTS (SELECT 1 FROM leases WHERE ends <= ?) OR boot != ? FROM store"
            if not database.execute(over, (self._clock(), self._boot)).fetchone()[0]:
                yield database
                return
        with contextlib.suppress(StorageFull, MetadataRefused), self._changing():
            pass
        with self._transaction("BEGIN") as database:
            yield database

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that may change the file, in which no lease is alive whose time is over."""
        with self._transaction("BEGIN IMMEDIATE") as database:
            end_what_is_over(database, self._clock(), self._boot)
            yield database
        with self._changed:
            self._changes_made += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with translate_errors(self._path):
            database = self._borrow()
            try:
                left = max(0.0, find_deadline(BUSY_SECONDS) - time.monotonic())
                database.execute(f"PRAGMA busy_timeout={left * 1000:.0f}")
                database.execute(begin)
                yield database
                database.execute("COMMIT")
            except BaseException:
                database.close()  # which undoes what wasn't committed
                raise
        with self._changed:
            if not self._closed.is_set():
                self._idle.append(database)
                return
        database.close()

    def _borrow(self) -> sqlite3.Connection:
        """Return a connection that no other call uses."""
        with self._changed:
            if self._closed.is_set():
                raise StoreUnavailable("A store of metadata is asked before it is closed. Open it again")
            if self._pid != os.getpid():
                _of_parents.extend(self._idle)
                self._idle, self._pid = [], os.getpid()
            database = self._idle.pop() if self._idle else None
        if self._identify() != self._identity:
            raise replaced_file(self._path)
        return database or open_file(self._path, self._cluster)

    def _identify(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return 0, 0
        return found.st_dev, found.st_ino

    # Records and changes

    def _find(self, database: sqlite3.Connection, key: bytes) -> Record | None:
        row = database.execute(f"SELECT {_COLUMNS} FROM records WHERE key = ?", (key,)).fetchone()
        return None if row is None else self._make_record(row)

    def _make_record(self, row: tuple[bytes, bytes, int, int, int]) -> Record:
        key, value, revision, lease, crc32 = row
        if _sum(key, value, revision) != crc32:
            raise damaged_record(self._path, key)
        return Record(key.decode(), value, revision, lease)

    def _read_changes(self, prefix: bytes, revision: int) -> tuple[list[Change], int]:
        """Return the changes after `revision`, and the revision up to which these are all."""
        with self._reading() as database:
            now, compacted = database.execute("SELECT revision, compacted FROM store").fetchone()
            if not compacted <= revision <= now:
                raise RevisionCompacted(
                    f"A watch begins at a revision from {compacted} to {now}. Received: {revision}. Read all "
                    f"again"
                )
            rows = database.execute(
                "SELECT key, revision, value, crc32 FROM changes WHERE revision > ? AND key >= ? AND key < ? "
                "ORDER BY position",
                (revision, prefix, find_end(prefix)),
            ).fetchall()
        for key, changed, value, crc32 in rows:
            if _sum(key, value, changed) != crc32:
                raise damaged_record(self._path, key)
        return [Change(key.decode(), changed, value) for key, changed, value, _ in rows], now


def end_what_is_over(database: sqlite3.Connection, now: float, boot: str) -> None:
    """End leases, forget ids of transactions: a function of what the file holds and of the time alone.

    The clock begins again when the machine starts. Each lease gets its whole time then, as etcd gives it
    after a change of its leader.
    """
    (before,) = database.execute("SELECT boot FROM store").fetchone()
    if before != boot:
        database.execute("UPDATE leases SET ends = ? + seconds", (now,))
        database.execute("UPDATE transactions SET made = ?", (now,))
        database.execute("UPDATE store SET boot = ?", (boot,))
    ended = database.execute("SELECT id FROM leases WHERE ends <= ? ORDER BY ends, id", (now,)).fetchall()
    for (lease,) in ended:
        _end_lease(database, lease)
    database.execute("DELETE FROM transactions WHERE made <= ?", (now - _REMEMBERED_SECONDS,))


def _end_lease(database: sqlite3.Connection, lease: int) -> None:
    keys = database.execute("SELECT key FROM records WHERE lease = ? AND lease != 0 ORDER BY key", (lease,))
    if removed := [(key, None, 0) for (key,) in keys.fetchall()]:
        _write(database, removed)
    database.execute("DELETE FROM leases WHERE id = ?", (lease,))


def _apply(database: sqlite3.Connection, operations: Sequence[Operation]) -> int:
    """Make the changes of a transaction. Return their revision."""
    changes = [
        (each.key.encode(), each.value, each.lease) if isinstance(each, Put) else (each.key.encode(), None, 0)
        for each in operations
    ]
    return _write(database, changes)


def _write(database: sqlite3.Connection, changes: Sequence[tuple[bytes, bytes | None, int]]) -> int:
    """Change keys (to None: remove them) at the next revision, and log it. Return the revision."""
    revision, position = database.execute(
        "UPDATE store SET revision = revision + 1 RETURNING revision, position"
    ).fetchone()
    for key, value, lease in changes:
        crc32 = _sum(key, value, revision)
        if value is not None:
            row = (key, value, revision, lease, crc32)
            database.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", row)
        elif database.execute("DELETE FROM records WHERE key = ?", (key,)).rowcount == 0:
            continue
        position += _CHANGE_BYTES + len(key) + len(value or b"")
        database.execute(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?)", (position, revision, key, value, crc32)
        )
    database.execute("UPDATE store SET position = ?", (position,))
    _compact(database, position - _LOG_BYTES)
    return int(revision)


def _compact(database: sqlite3.Connection, position: int) -> None:
    """Drop changes up to `position`, whole revisions of them."""
    oldest = "SELECT revision FROM changes WHERE position <= ? ORDER BY position DESC LIMIT 1"
    found = database.execute(oldest, (position,)).fetchone()
    if found is not None:
        database.execute("DELETE FROM changes WHERE revision <= ?", found)
        database.execute("UPDATE store SET compacted = ?", found)


def _require_lease(database: sqlite3.Connection, lease: int) -> None:
    if database.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).fetchone() is None:
        raise LeaseEnded(
            f"A key goes with a lease that is alive. Received: lease {lease}, which has ended. Grant another",
            lease=lease,
        )


def _find_made(database: sqlite3.Connection, id: str) -> Outcome | None:
    """Return the outcome of a transaction that was made; None: none of this id was."""
    made = database.execute("SELECT revision FROM transactions WHERE id = ?", (id,)).fetchone()
    return None if made is None else Outcome(True, made[0])


def _read_revision(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT revision FROM store").fetchone()[0])


def _sum(key: bytes, value: bytes | None, revision: int) -> int:
    """Return the checksum of a key with its value."""
    return zlib.crc32(value or b"", zlib.crc32(key, revision & 0xFFFFFFFF))


# The SQLite file of the embedded store: makes it whole, opens it, and says what is wrong with it.
#
# `store` has one row. `changes` is the log that watches read: `position` counts the bytes that were ever
# logged, so the oldest rows can be dropped by it. Keys are UTF-8, whose bytes SQLite compares as etcd does


BUSY_SECONDS = 5.0
"""How long a call waits for another process that changes the file: its deadline."""
_APPLICATION, _SCHEMA_VERSION = 0x496E4D44, 1
_SCHEMA = """
CREATE TABLE store (cluster TEXT NOT NULL, revision INTEGER NOT NULL, compacted INTEGER NOT NULL,
    position INTEGER NOT NULL, boot TEXT NOT NULL);
CREATE TABLE records (key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
    lease INTEGER NOT NULL, crc32 INTEGER NOT NULL);
CREATE INDEX records_by_lease ON records (lease) WHERE lease != 0;
CREATE TABLE changes (position INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key BLOB NOT NULL, value BLOB,
    crc32 INTEGER NOT NULL);
CREATE INDEX changes_by_revision ON changes (revision);
CREATE TABLE transactions (id TEXT PRIMARY KEY, revision INTEGER NOT NULL, made REAL NOT NULL);
CREATE INDEX transactions_by_time ON transactions (made);
CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, seconds REAL NOT NULL, ends REAL NOT NULL);
"""
_REFUSED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA}


def create_file(path: Path, cluster: str, boot: str) -> None:
    """Make the file of a new store, unless there is one. It appears whole, and survives a power cut."""
    if path.exists():
        return
    staged = path.with_name(f"{STAGING}{path.name}-{secrets.token_hex(4)}")
    with translate_errors(path):
        os.close(os.open(staged, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with contextlib.closing(_connect(staged)) as database:
                # A transaction is one write to the log, and readers never wait.
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
                # So no revision of another store, which a client may name, comes again in this one.
                first = time.time_ns() // 1000
                database.execute("INSERT INTO store VALUES (?, ?, ?, 0, ?)", (cluster, first, first, boot))
                database.execute(f"PRAGMA application_id={_APPLICATION}")
                database.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
                database.execute("COMMIT")
            with contextlib.suppress(FileExistsError):
                os.link(staged, path)  # unlike a rename it replaces nothing
            sync_folder(path.parent)
        finally:
            staged.unlink()


def open_file(path: Path, cluster: str) -> sqlite3.Connection:
    """Return a connection to the file of a store. Raises MetadataError if it is another cluster's."""
    if not path.exists():
        raise InputError(
            f"A cluster's metadata must be in {path}. Received: no such file. `insitu up` makes it for a new "
            f"cluster, `insitu repair` from what the nodes hold"
        )
    database = _connect(path)
    try:
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION:
            raise _corrupt(path, "a file of something else, or an empty one")
        if version > _SCHEMA_VERSION:
            raise MetadataRefused(
                f"{path} must be of format {_SCHEMA_VERSION} or older. Received: {version}, of a newer "
                f"insitu. Update insitu"
            )
        (found,) = database.execute("SELECT cluster FROM store").fetchone()
        if found != cluster:
            raise CorruptMetadata(
                f"{path} must hold the metadata of cluster {cluster}. Received: that of cluster {found}. "
                f"Name another file"
            )
    except BaseException:
        database.close()
        raise
    return database


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    database.execute("PRAGMA synchronous=FULL")  # what is acknowledged survives a power cut
    return database


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite and of the system as insitu's, each with what to do. Only damage is damage."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(path, error) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _full(path, str(error)) from error
        raise MetadataRefused(_refusal(path, str(error))) from error


def _translate(path: Path, error: sqlite3.Error) -> Exception:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    text = f"{error} ({getattr(error, 'sqlite_errorname', 'no number')})"
    if code in _CORRUPT:
        return _corrupt(path, text)
    if code in _REFUSED:
        return MetadataRefused(_refusal(path, text))
    if code == sqlite3.SQLITE_FULL:
        return _full(path, text)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable(
            f"A change of {path} waits up to {BUSY_SECONDS:g} s for another one. Received: {text}. Look "
            f"which process holds it (`fuser {path}`), and try again"
        )
    if code == sqlite3.SQLITE_IOERR:
        return StoreUnavailable(
            f"The disk must read and write {path}. Received: {text}. Look at the system's log (`dmesg`), and "
            f"try again"
        )
    return MetadataError(f"SQLite must do what insitu asks of {path}. Received: {text}. Report this")


def _corrupt(path: Path, received: str) -> CorruptMetadata:
    return CorruptMetadata(
        f"{path} must hold a cluster's metadata whole. Received: {received}. Move it away; `insitu repair` "
        f"makes it from what the nodes hold"
    )


def damaged_record(path: Path, key: bytes) -> CorruptMetadata:
    """Return the error for a key whose checksum differs."""
    return _corrupt(path, f"another checksum for {key.decode(errors='replace')}")


def replaced_file(path: Path) -> CorruptMetadata:
    """Return the error for a file that isn't the one that was opened."""
    return _corrupt(path, "a file that was removed or replaced while it was in use")


def _refusal(path: Path, received: str) -> str:
    return (
        f"This user must be able to read and write {path} and its folder. Received: {received}. Look at "
        f"their modes, and whether the file system is mounted read-only"
    )


def _full(path: Path, received: str) -> StorageFull:
    return StorageFull(f"{path} needs room to grow. Received: {received}. Make room there, and try again")
