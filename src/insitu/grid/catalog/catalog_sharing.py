"""The catalogue of a cluster whose metadata is in etcd: that has the truth, and readers see what SQLite has.

A change is made in SQLite's transaction first. It goes to etcd by one transaction, which compares the
key of the head and the last change of the catalogue. If that was made, SQLite commits. So a head that leads
no more changes nothing, and the next one finds all that was acknowledged.

Whether etcd has made a change may be unknown: its answer is lost, or this process dies. So the change's id is
written down before. Who comes next, also a reader, has etcd say what became of it, and takes what etcd has.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Iterator, Sequence

from insitu.base.disk.access import file_mode
from insitu.base.disk.durable import replace_file, staged_file, sync_folder, write_synced
from insitu.base.errors import CorruptCatalog, GridError, HeadReplaced, InputError, MetadataError, StorageFull
from insitu.base.paths import Paths
from insitu.grid.catalog.catalog_records import (
    PREFIX,
    encode_row,
    find_step,
    insert_records,
    key_expressions,
    list_spec_keys,
    split_spec,
)
from insitu.metadata import (
    HEAD_KEY,
    MAX_TRANSACTION_BYTES,
    Compare,
    Delete,
    FencedStore,
    Operation,
    Put,
    Record,
    open_fenced,
)

logger = logging.getLogger("insitu")
_CHANGES = f"{PREFIX}changes"
"""The key that each change writes, with its id."""
_NEVER = f"{PREFIX}never"
"""A key that there never is."""
_PAGE = 100
"""Keys that are read within one deadline."""
_AT_ONCE, _BYTES_AT_ONCE = 90, MAX_TRANSACTION_BYTES - (64 << 10)
"""Keys of one transaction, and their bytes. A larger change is several, in an order in which each version is
whole until it is replaced."""


def is_in_etcd(paths: Paths) -> bool:
    """Return whether etcd has the catalogue of this home."""
    return paths.metadata_settings.exists()


def is_behind(paths: Paths) -> bool:
    """Return whether etcd may know more than the catalogue of this home, which leads."""
    return paths.fence.exists() and (paths.catalog_pending.exists() or not paths.catalog.exists())


def is_catalog_record(key: str) -> bool:
    """Return whether a key of etcd is of the catalogue."""
    return key.startswith(PREFIX)


def encode_catalog(database: sqlite3.Connection) -> dict[str, bytes]:
    """Return all entries of a catalogue for etcd, in a transaction."""
    _make_tables(database)
    found = {_CHANGES: secrets.token_bytes(8)}  # another one, so that its revision is new
    for table, expression in key_expressions("main").items():
        for (key,) in database.execute(f"SELECT DISTINCT {expression} FROM {table} AS main").fetchall():
            found |= {key: encode_row(database, key) or b"", **dict(split_spec(database, key))}
    return found


def begin_file(paths: Paths) -> None:
    """Have readers wait for what etcd has, before a catalogue is made here, which is empty at first."""
    if is_in_etcd(paths) and not paths.catalog.exists():
        # A change that another process has noted meanwhile stays noted.
        with staged_file(paths.catalog_pending) as staged, contextlib.suppress(FileExistsError):
            write_synced(staged, secrets.token_hex(16).encode(), file_mode(paths.home))
            paths.catalog_pending.hardlink_to(staged)
            sync_folder(paths.home)


@contextlib.contextmanager
def shared_transaction(paths: Paths, database: sqlite3.Connection, fence: bytes | None) -> Iterator[None]:
    """Have etcd make what is changed within the block, in a transaction of SQLite that is committed after it.

    `fence` is what `read_fence` returned when the work began, if no other head may have led since; None: it
    may. Raises GridError if etcd doesn't make the change, and nothing may be committed then.
    """
    with _errors_translated(paths):
        store = open_fenced(paths)
        if store is None:
            raise GridError(f"{paths.metadata_settings} has gone. Try again")
        with contextlib.closing(store):
            if fence is not None and fence != store.fence:
                raise HeadReplaced(
                    "A change is made while the head leads under which it was begun. Received: a change "
                    "that was begun before another head led. Nothing was changed. Run the command again"
                )
            revision = _catch_up(paths, database, store)
            yield
            _send(paths, database, store, revision)


def _record_pending(paths: Paths, change: str) -> None:
    replace_file(paths.catalog_pending, change.encode(), sync=True, mode=file_mode(paths.home))


def read_pending(paths: Paths) -> str:
    """Return the id of the change of which etcd may know more; "": none."""
    try:
        return paths.catalog_pending.read_text()
    except FileNotFoundError:
        return ""


def record_committed(paths: Paths, database: sqlite3.Connection, change: str) -> None:
    """Note that SQLite has what etcd has, after `change`. Another process may have begun the next change, and
    it continues from that note, or may have left its own."""
    database.execute("PRAGMA busy_timeout = 0")
    with contextlib.suppress(sqlite3.OperationalError):
        database.execute("BEGIN IMMEDIATE")
        if read_pending(paths) == change:
            paths.catalog_pending.unlink(missing_ok=True)
        database.execute("ROLLBACK")


@contextlib.contextmanager
def _errors_translated(paths: Paths) -> Iterator[None]:
    try:
        yield
    except HeadReplaced as error:
        raise GridError(str(error)) from error
    except MetadataError as error:
        unknown = "; it may have been made, `insitu caches` says so then" if is_behind(paths) else ""
        raise GridError(
            f"The catalogue is changed in etcd. Received: {error}. Try again when it answers{unknown}"
        ) from error


def _catch_up(paths: Paths, database: sqlite3.Connection, store: FencedStore) -> int:
    """Let SQLite have what etcd has, and note from now on what is changed. Returns the revision of the last
    change in etcd; 0: it has no catalogue yet, and gets all that SQLite has."""
    if change := read_pending(paths):
        # Once this is refused under the id, the change can't be made any more.
        store.transact([Compare(_NEVER, 1)], [], change)
    found, _ = store.get([_CHANGES, HEAD_KEY])
    store.check(found.get(HEAD_KEY))
    last = found.get(_CHANGES)
    _make_tables(database)
    known = database.execute("SELECT id FROM last_change").fetchone()
    if last is not None and known != (last.value,):  # its revision may be there again, if etcd was restored
        last = _load(paths, database, store)
    database.execute("CREATE TEMP TABLE touched (key TEXT PRIMARY KEY)")
    for table in key_expressions("NEW"):
        for event, rows in (("INSERT", ("NEW",)), ("DELETE", ("OLD",)), ("UPDATE", ("OLD", "NEW"))):
            keys = (key_expressions(row)[table] for row in rows)
            notes = "".join(f"INSERT OR REPLACE INTO touched VALUES ({key});" for key in keys)
            database.execute(
                f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} BEGIN {notes} END"
            )
    if last is None:
        for table, key in key_expressions("main").items():
            database.execute(f"INSERT OR REPLACE INTO touched SELECT {key} FROM {table} AS main")
    return 0 if last is None else last.revision


def _make_tables(database: sqlite3.Connection) -> None:
    database.execute("CREATE TABLE IF NOT EXISTS deleted (cache TEXT PRIMARY KEY, version INTEGER NOT NULL)")
    database.execute("CREATE TABLE IF NOT EXISTS last_change (id BLOB NOT NULL)")


def _load(paths: Paths, database: sqlite3.Connection, store: FencedStore) -> Record:
    """Replace what SQLite has by what etcd has. Returns the last change."""
    found: dict[str, Record] = {}
    after = ""
    while page := store.range(PREFIX, after, _PAGE)[0]:
        found |= {record.key: record for record in page}
        after = page[-1].key
    now, _ = store.get([_CHANGES, HEAD_KEY])
    store.check(now.get(HEAD_KEY))  # so no other head has changed anything between two pages
    last = found.pop(_CHANGES)
    try:
        insert_records(database, {key: record.value for key, record in found.items()})
    except (ValueError, KeyError, TypeError, sqlite3.Error) as error:
        raise CorruptCatalog(
            f"etcd must hold the catalogue as insitu writes it. Received: what can't be read ({error}). "
            f"Restore etcd from a snapshot"
        ) from error
    _record_change(database, last.value)
    logger.info("the catalogue of %s is that of etcd at revision %d", paths.home, last.revision)
    return last


def _record_change(database: sqlite3.Connection, change: bytes) -> None:
    database.execute("DELETE FROM last_change")
    database.execute("INSERT INTO last_change VALUES (?)", (change,))


def _send(paths: Paths, database: sqlite3.Connection, store: FencedStore, revision: int) -> None:
    """Have etcd make what was changed."""
    change = ""
    for number, batch in enumerate(_cut(_find_operations(database, store))):
        change = secrets.token_hex(16)
        try:
            revision = _transact(paths, store, revision, change, batch)
        except (HeadReplaced, StorageFull):
            if not number:  # nothing was changed, so readers need not ask
                paths.catalog_pending.unlink(missing_ok=True)
            raise
    if change:
        _record_change(database, change.encode())


def _find_operations(database: sqlite3.Connection, store: FencedStore) -> Sequence[Operation]:
    """Return what makes etcd have what SQLite has. Specifications, which never change, are written at once: a
    version counts by its own key alone."""
    touched = [key for (key,) in database.execute("SELECT key FROM touched")]
    if not touched:
        return ()
    found, _ = store.get(touched)
    operations: list[Operation] = []
    for key in touched:
        before, value = found.get(key), encode_row(database, key)
        if value is None:
            operations += [Delete(key)] if before is not None else []
            operations += [Delete(each) for each in (list_spec_keys(key, before.value) if before else ())]
        elif before is None or before.value != value:
            for piece, data in split_spec(database, key) if before is None else ():
                store.transact([], [Put(piece, data)], secrets.token_hex(16))
            operations.append(Put(key, value))
    return operations


def _cut(operations: Sequence[Operation]) -> Sequence[Sequence[Operation]]:
    """Return what is changed at once: all, or else what each version needs before it."""
    batches = _fill(operations)
    if len(batches) < 2:
        return batches
    steps: tuple[list[Operation], ...] = ([], [], [])
    for each in sorted(operations, key=lambda each: isinstance(each, Delete)):
        steps[find_step(each.key, is_put=isinstance(each, Put))].append(each)
    return [batch for step in steps for batch in _fill(step)]


def _fill(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Cut operations, in their order, into what one transaction takes."""
    batches: list[list[Operation]] = []
    size = 0
    for each in operations:
        need = len(each.key) + (len(each.value) if isinstance(each, Put) else 0)
        if not batches or len(batches[-1]) == _AT_ONCE or size + need > _BYTES_AT_ONCE:
            batches.append([])
            size = 0
        batches[-1].append(each)
        size += need
    return batches


def _transact(
    paths: Paths, store: FencedStore, revision: int, change: str, operations: Sequence[Operation]
) -> int:
    """Make a change of the catalogue after that of `revision`. Returns its own revision."""
    _record_pending(paths, change)
    try:
        changes = [Put(_CHANGES, change.encode()), *operations]
        outcome = store.transact([Compare(_CHANGES, revision)], changes, change)
    except InputError as error:
        raise GridError(
            f"What one key of the catalogue in etcd holds is bounded. Received: {error}. Import fewer "
            f"caches, or have fewer jobs use them at the same time"
        ) from error
    if not outcome.succeeded:
        raise GridError("The catalogue in etcd was changed by another process meanwhile. Try again")
    return outcome.revision
