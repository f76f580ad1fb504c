"""The catalogue: all caches with their versions, and the jobs that use them.

One SQLite file. A version is published by one transaction: no process sees it before, every process after.
If etcd has the metadata of the cluster, it makes each change first (`catalog_sharing.py`). Nothing here opens
a partition.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

from insitu.base.disk.access import is_shared, make_file, make_folder
from insitu.base.disk.durable import NO_ROOM
from insitu.base.disk.guarded_paths import open_folder
from insitu.base.errors import (
    CacheBusy,
    CacheExists,
    CorruptCatalog,
    GridError,
    InputError,
    StorageFull,
    UnknownCache,
)
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, PlacedCopy, check_cache_name, split_version
from insitu.base.wording import inflect
from insitu.grid.catalog.catalog_copy import drop_copy, refuse_change, refuse_copy
from insitu.grid.catalog.catalog_schema import (
    SCHEMA_VERSION,
    bring_up_to_date,
    insert_version,
    read_schema_version,
    record_deleted,
    select_deleted,
    select_placement,
    select_versions,
    write_placement,
)
from insitu.grid.catalog.catalog_sharing import (
    begin_file,
    encode_catalog,
    is_behind,
    is_in_etcd,
    read_pending,
    record_committed,
    shared_transaction,
)
from insitu.metadata import read_fence

BUSY_TIMEOUT_SECONDS = 30.0

_ONE_VERSION = "WHERE cache = ? AND version = ?"
P = ParamSpec("P")
R = TypeVar("R")


class Catalog:
    """The catalogue at `paths.catalog`. Each call is one transaction of its own connection.

    Every method raises CorruptCatalog if the file can't be read, StorageFull if it can't grow. Changes raise
    GridError if it is the copy of a head's.
    """

    def __init__(self, paths: Paths, *, of_one_head: bool = False) -> None:
        """`of_one_head`: refuse changes by GridError once another head has led since this was made."""
        self._paths = paths
        self._fence = read_fence(paths) if of_one_head else None

    def caches(self) -> list[CacheSpec]:
        """Return the latest version of each cache, by name."""
        return self._select("WHERE latest = 1 ORDER BY cache")

    def stored(self) -> list[CacheSpec]:
        """Return every version whose partitions are kept: the latest, and older ones that a job uses."""
        return self._select("ORDER BY cache, version")

    def find(self, name: str, version: int | None = None) -> CacheSpec | None:
        """Return one version of a cache (None: the latest), or None if there is none."""
        where = "WHERE cache = ? AND " + ("latest = 1" if version is None else "version = ?")
        found = self._select(where, (name,) if version is None else (name, version))
        return found[0] if found else None

    def is_published(self, name: str, version: int) -> bool:
        """Return whether a version is there, for who removes its files if it isn't. Raises GridError if this
        home can't know: etcd has the catalogue, and another head may lead."""
        if not is_in_etcd(self._paths):
            return self.find(name, version) is not None
        with self._transaction() as database:
            return bool(self._decoded(select_versions, database, _ONE_VERSION, (name, version)))

    def get(self, name: str, version: int | None = None) -> CacheSpec:
        """Return one version of a cache (None: the latest). Raises UnknownCache with similar names."""
        found = self.find(name, version)
        if found is not None:
            return found
        if version is not None and (latest := self.find(name)) is not None:
            there = [
                str(cache.version) for cache in self._select("WHERE cache = ? ORDER BY version", (name,))
            ]
            raise UnknownCache(
                f"A version of a cache is there while it is the latest, or a job uses it. Received: version "
                f"{version} of {name}, which has {inflect(len(there), 'version', 'versions')} "
                f"{', '.join(there)}. Name {name}@{latest.version}, or {name} for the latest"
            )
        names = [cache.name for cache in self.caches()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or [
            n for n in names if n.startswith(f"{name}/") or name.startswith(f"{n}/")
        ]
        raise UnknownCache(
            f"No cache is called {name!r} in {self._paths.home}. "
            + (f"Did you mean {' or '.join(near)}? " if near else "")
            + ("`insitu caches` lists them all" if names else "There are none yet; `insitu import` makes one")
        )

    def get_named(self, text: str) -> CacheSpec:
        """Return the version that `text` names, as orders@3 or orders. Raises UnknownCache, InputError."""
        return self.get(*split_version(text))

    def publish(self, caches: Sequence[CacheSpec], *, overwrite: bool = False) -> list[CacheSpec]:
        """Make `caches` the latest versions, all in one transaction.

        Returns the versions that are no longer used, whose files can be deleted. Raises CacheExists if a
        cache is there and `overwrite` is not given.
        """
        dropped: list[CacheSpec] = []
        with self._transaction() as database:
            for cache in caches:
                check_cache_name(cache.name)
                known = database.execute("SELECT 1 FROM versions WHERE cache = ?", (cache.name,)).fetchone()
                if known and not overwrite:
                    raise CacheExists(
                        f"Cache {cache.name} exists. Give --overwrite to put a new version in its place"
                    )
                database.execute("UPDATE versions SET latest = 0 WHERE cache = ?", (cache.name,))
                insert_version(database, cache, latest=True)
            dropped += self._drop_unused(database)
        return dropped

    def delete(self, name: str) -> None:
        """Drop all versions of a cache in one transaction; the caller removes their files. Raises InputError
        if a job has pinned one."""
        with self._transaction() as database:
            pins = database.execute("SELECT DISTINCT job FROM pins WHERE cache = ?", (name,)).fetchall()
            if pins:
                raise InputError(f"Job {pins[0][0]} has begun to use {name}. Stop it first")
            record_deleted(database, name)
            database.execute("DELETE FROM placement WHERE cache = ?", (name,))
            database.execute("DELETE FROM versions WHERE cache = ?", (name,))

    def deleted(self) -> dict[str, int]:
        """Return the highest version that was deleted of each cache."""
        with self._reading() as database:
            return {} if database is None else self._decoded(select_deleted, database)

    def restore(self, caches: Sequence[CacheSpec]) -> None:
        """Add versions that were lost from the catalogue, all in one transaction. The highest of each cache
        becomes the latest one."""
        with self._transaction() as database:
            for cache in caches:
                insert_version(database, cache, latest=False)
            newest = "SELECT MAX(version) FROM versions AS other WHERE other.cache = versions.cache"
            database.execute(f"UPDATE versions SET latest = (version = ({newest}))")

    def placement(self, cache: str, version: int) -> list[PlacedCopy]:
        """Return the copies of a version by partition, each partition's primary owner first."""
        with self._reading() as database:
            if database is None:
                return []
            if read_schema_version(database) == 1:
                found = self._decoded(select_versions, database, _ONE_VERSION, (cache, version))
                return [
                    PlacedCopy(p.index, node) for spec in found for p in spec.partitions for node in p.owners
                ]
            return self._decoded(select_placement, database, cache, version)

    def change_placement(
        self, cache: str, version: int, change: Callable[[list[PlacedCopy]], Sequence[PlacedCopy]]
    ) -> None:
        """Replace the copies of a version by what `change` makes of them, in one transaction.

        Raises UnknownCache if the version is not there, GridError if a partition would have no copy that is
        live or lost.
        """
        with self._transaction() as database:
            spec = next(iter(self._decoded(select_versions, database, _ONE_VERSION, (cache, version))), None)
            if spec is None:
                raise UnknownCache(f"Cache {cache} has no version {version} any more")
            copies = change(self._decoded(select_placement, database, cache, version))
            kept = {copy.partition for copy in copies if copy.state != "copying"}
            missing = sorted({p.index for p in spec.partitions} - kept)
            if missing:
                raise GridError(
                    f"Each partition keeps an owner. Received: none for "
                    f"{inflect(len(missing), 'partition', 'partitions')} {', '.join(map(str, missing))} of "
                    f"{cache} version {version}. Copy them first"
                )
            write_placement(database, cache, version, copies)

    def stores(self) -> dict[str, NodeId]:
        """Return the node that each store was last seen on, by the store's id."""
        with self._reading() as database:
            if database is None or read_schema_version(database) == 1:
                return {}
            return {store: NodeId(node) for store, node in database.execute("SELECT * FROM stores")}

    def record_stores(self, stores: Mapping[str, NodeId], moved: Mapping[NodeId, NodeId]) -> None:
        """Write down the node that each store is on. Copies on a node of `moved` are on its new one."""
        with self._transaction() as database:
            for node in stores.values():
                # A node whose disk was replaced: should the former one come back, it is a new store.
                database.execute("DELETE FROM stores WHERE node = ?", (node,))
            for store, node in stores.items():
                database.execute("INSERT OR REPLACE INTO stores VALUES (?, ?)", (store, node))
            # In two steps, since nodes may have swapped their stores.
            for old in moved:
                database.execute("UPDATE placement SET node = '>' || node WHERE node = ?", (old,))
            for old, new in moved.items():
                database.execute("UPDATE OR REPLACE placement SET node = ? WHERE node = '>' || ?", (new, old))

    def pin(self, cache: str, version: int, job_id: str) -> None:
        """Keep this version until `unpin(job_id)`. Raises UnknownCache if it is gone already."""
        with self._transaction() as database:
            key = (cache, version)
            if not database.execute("SELECT 1 FROM versions WHERE cache = ? AND version = ?", key).fetchone():
                raise UnknownCache(f"Cache {cache} has no version {version} any more. Start the job again")
            database.execute("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", (*key, job_id))

    def unpin(self, job_id: str) -> None:
        """Remove the pins of `job_id`, and delete the versions that are then unused."""
        if not self._paths.catalog.exists():
            return
        with self._transaction() as database:
            database.execute("DELETE FROM pins WHERE job = ?", (job_id,))
            dropped = self._drop_unused(database)
        self.remove_files(dropped)

    def pinned_by(self, cache: str, version: int | None = None) -> list[str]:
        """Return the jobs that use a version of `cache` (None: any version)."""
        with self._reading() as database:
            if database is None:
                return []
            query = "SELECT DISTINCT job FROM pins WHERE cache = ? AND ? IN (version, -1) ORDER BY job"
            return [job for (job,) in database.execute(query, (cache, -1 if version is None else version))]

    def remove_files(self, versions: Sequence[CacheSpec]) -> None:
        """Delete the partitions of versions that the catalogue doesn't hold any more."""
        for cache in versions:
            for node in {owner for p in cache.partitions for owner in p.owners}:
                version = self._paths.version(node, cache.name, cache.version)
                # In a shared home others may put links in the place of folders.
                opening = open_folder(self._paths.home, version.parent, follow=True)
                with contextlib.suppress(OSError), opening as opened:
                    shutil.rmtree(opened / version.name, ignore_errors=True)

    def take_over(self) -> None:
        """Take the catalogue from etcd, instead of a copy: this home leads the cluster now."""
        drop_copy(self._paths)
        with self._transaction():
            pass

    @contextlib.contextmanager
    def hold(self) -> Iterator[dict[str, bytes]]:
        """Yield the catalogue for etcd, while nobody changes it."""
        with self._transaction() as database:
            yield self._decoded(encode_catalog, database)

    def clear(self) -> None:
        """Forget all caches and pins."""
        if self._paths.catalog.exists():
            with self._transaction() as database:
                found = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
                for table in found & {"versions", "placement", "stores", "pins", "deleted"}:
                    database.execute(f"DELETE FROM {table}")

    def _select(self, where: str, values: tuple[str | int, ...] = ()) -> list[CacheSpec]:
        with self._reading() as database:
            if database is None:
                return []
            return self._decoded(select_versions, database, where, values)

    def _drop_unused(self, database: sqlite3.Connection) -> list[CacheSpec]:
        unused = "WHERE latest = 0 AND (cache, version) NOT IN (SELECT cache, version FROM pins)"
        dropped = self._decoded(select_versions, database, unused, ())
        for cache in dropped:
            write_placement(database, cache.name, cache.version, ())
        database.execute(f"DELETE FROM versions {unused}")
        return dropped

    def _decoded(self, read: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Return what `read` does. Raises CorruptCatalog if an entry can't be trusted."""
        try:
            return read(*arguments, **options)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._make_corrupt_error(f"an entry can't be trusted: {error}") from error

    def _make_corrupt_error(self, why: str) -> CorruptCatalog:
        return CorruptCatalog(
            f"The catalogue at {self._paths.catalog} can't be read ({why}). `insitu repair` "
            f"keeps it under another name, and makes a new one from what is in the stores"
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection, or None if there is no catalogue yet."""
        if is_behind(self._paths):
            with self._transaction():
                pass
        if not self._paths.catalog.exists():
            yield None
            return
        with self._connected() as database:
            # One transaction, so that a version and its placement belong together.
            database.execute("BEGIN")
            yield database if self._version(database) else None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        refuse_copy(self._paths)
        make_folder(self._paths.home, self._paths.home)
        begin_file(self._paths)
        try:
            make_file(self._paths.home, self._paths.catalog)
        except OSError as error:
            kind = StorageFull if error.errno in NO_ROOM else GridError
            raise kind(
                f"{self._paths.catalog} can't be opened ({error.strerror}). Check that there is room, and "
                f"who may read and write it"
            ) from error
        with self._connected() as database:
            database.execute("BEGIN IMMEDIATE")
            shares = is_in_etcd(self._paths)  # it may have been moved there while this waited
            try:
                refuse_change(self._paths, database)
                if self._version(database) != SCHEMA_VERSION:
                    self._decoded(bring_up_to_date, database)
                if shares:
                    with shared_transaction(self._paths, database, self._fence):
                        yield database
                else:
                    yield database
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise
            change = read_pending(self._paths) if shares else ""
            database.execute("COMMIT")
            if shares:
                record_committed(self._paths, database, change)

    def _version(self, database: sqlite3.Connection) -> int:
        version = read_schema_version(database)
        if not 0 <= version <= SCHEMA_VERSION:
            raise CorruptCatalog(
                f"The catalogue at {self._paths.catalog} must have a format in [1, {SCHEMA_VERSION}]. "
                f"Received: {version}. Use the newer insitu that wrote it"
            )
        return version

    def _make_journal(self) -> None:
        """Make the journal of a shared home, which stays: SQLite would follow a link in its place.

        Raises GridError for a link.
        """
        try:
            make_file(self._paths.home, self._paths.catalog_journal)
        except OSError as error:
            if error.errno != errno.ELOOP:
                return  # a home that can be read alone
            raise GridError(
                f"The journal of a catalogue is a file. Received: {self._paths.catalog_journal}, which "
                f"somebody has made a link. Have it removed"
            ) from error

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if is_shared(self._paths.home):
            self._make_journal()
        try:
            with contextlib.closing(
                sqlite3.connect(self._paths.catalog, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
            ) as database:
                # A commit whose end a power cut undoes would bring back a version whose files are gone.
                database.execute("PRAGMA synchronous = EXTRA")
                if is_shared(self._paths.home):
                    # Members of a group may write to each other's files, but not remove them.
                    database.execute("PRAGMA journal_mode = TRUNCATE")
                (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
                if verdict != "ok":
                    raise self._make_corrupt_error(verdict)
                yield database
        except UnicodeDecodeError as error:  # SQLite names an index whose name is damaged, too
            raise self._make_corrupt_error(str(error)) from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF == sqlite3.SQLITE_BUSY:
                raise CacheBusy(
                    f"Another process has kept {self._paths.catalog} locked for {BUSY_TIMEOUT_SECONDS:g} s"
                ) from error
            if code & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
                raise GridError(
                    f"{self._paths.catalog} can't be opened ({error}). Check who may read and write it"
                ) from error
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
                raise StorageFull(f"No room is left for {self._paths.catalog} ({error})") from error
            raise self._make_corrupt_error(str(error)) from error
