"""The catalogue: all caches with their versions, and the jobs that use them.

One SQLite file. A version is published by one transaction: no process sees it before, every process after.
Nothing here opens a partition.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Sequence

from insitu.access import is_shared, make_file, make_folder
from insitu.durable import NO_ROOM
from insitu.errors import CacheBusy, CacheExists, CorruptCatalog, GridError, StorageFull, UnknownCache
from insitu.paths import Paths
from insitu.spec import CacheSpec, check_cache_name

SCHEMA_VERSION = 1
BUSY_TIMEOUT_SECONDS = 30.0

_SCHEMA = f"""
CREATE TABLE versions (
    cache TEXT NOT NULL, version INTEGER NOT NULL, latest INTEGER NOT NULL, spec TEXT NOT NULL,
    crc32 INTEGER NOT NULL, PRIMARY KEY (cache, version));
CREATE TABLE pins (
    cache TEXT NOT NULL, version INTEGER NOT NULL, job TEXT NOT NULL, PRIMARY KEY (cache, version, job));
PRAGMA user_version = {SCHEMA_VERSION};
"""


class Catalog:
    """The catalogue at `paths.catalog`. Each call is one transaction of its own connection.

    Every method raises CorruptCatalog where the file can't be read, StorageFull where it can't grow.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def caches(self) -> list[CacheSpec]:
        """Return the latest version of each cache, by name."""
        return self._select("WHERE latest = 1 ORDER BY cache")

    def stored(self) -> list[CacheSpec]:
        """Return every version whose partitions are kept: the latest, and older ones that a job uses."""
        return self._select("ORDER BY cache, version")

    def find(self, name: str, version: int | None = None) -> CacheSpec | None:
        """Return one version of a cache (None: the latest), or None where there is none."""
        where = "WHERE cache = ? AND " + ("latest = 1" if version is None else "version = ?")
        found = self._select(where, (name,) if version is None else (name, version))
        return found[0] if found else None

    def get(self, name: str, version: int | None = None) -> CacheSpec:
        """Return one version of a cache (None: the latest). Raises UnknownCache with similar names."""
        found = self.find(name, version)
        if found is not None:
            return found
        if version is not None and (latest := self.find(name)) is not None:
            raise UnknownCache(
                f"Cache {name} has no version {version} any more; its latest is {latest.version}"
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

    def publish(self, caches: Sequence[CacheSpec], *, overwrite: bool = False) -> list[CacheSpec]:
        """Make `caches` the latest versions, all in one transaction.

        Returns the versions that are no longer used, whose files can be deleted. Raises CacheExists where a
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
                text = json.dumps(cache.to_json())
                row = (cache.name, cache.version, 1, text, zlib.crc32(text.encode()))
                database.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", row)
            dropped += self._drop_unused(database)
        return dropped

    def pin(self, cache: str, version: int, job_id: str) -> None:
        """Keep this version until `unpin(job_id)`. Raises UnknownCache where it is gone already."""
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
                shutil.rmtree(self._paths.version(node, cache.name, cache.version), ignore_errors=True)

    def clear(self) -> None:
        """Forget all caches and pins."""
        if self._paths.catalog.exists():
            with self._transaction() as database:
                database.execute("DELETE FROM versions")
                database.execute("DELETE FROM pins")

    def _select(self, where: str, values: tuple[str | int, ...] = ()) -> list[CacheSpec]:
        with self._reading() as database:
            if database is None:
                return []
            rows = database.execute(f"SELECT spec, crc32 FROM versions {where}", values).fetchall()
        return [self._decode(text, crc32) for text, crc32 in rows]

    def _drop_unused(self, database: sqlite3.Connection) -> list[CacheSpec]:
        unused = "latest = 0 AND (cache, version) NOT IN (SELECT cache, version FROM pins)"
        rows = database.execute(f"SELECT spec, crc32 FROM versions WHERE {unused}").fetchall()
        database.execute(f"DELETE FROM versions WHERE {unused}")
        return [self._decode(text, crc32) for text, crc32 in rows]

    def _decode(self, text: str, crc32: int) -> CacheSpec:
        try:
            if zlib.crc32(text.encode()) != crc32:
                raise ValueError("its checksum differs")
            return CacheSpec.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._make_corrupt_error(f"an entry can't be trusted: {error}") from error

    def _make_corrupt_error(self, why: str) -> CorruptCatalog:
        return CorruptCatalog(
            f"The catalogue at {self._paths.catalog} can't be read ({why}). Put back a copy of it, or "
            f"move it away and import the caches again"
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection, or None where there is no catalogue yet."""
        if not self._paths.catalog.exists():
            yield None
            return
        with self._connected() as database:
            yield database if self._version(database) else None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        make_folder(self._paths.home, self._paths.home)
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
            try:
                if not self._version(database):
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        database.execute(statement)
                yield database
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def _version(self, database: sqlite3.Connection) -> int:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise self._make_corrupt_error(f"its format is {version}, this insitu knows {SCHEMA_VERSION}")
        return int(version)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
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
