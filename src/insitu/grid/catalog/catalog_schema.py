"""The tables of the catalogue, and how specifications are put into them and taken out.

`versions` has what never changes of a version. `placement` has the nodes of its partitions; `position` gives
the order, the primary owner first. `stores` has the node that each store was last seen on. `deleted` has the
highest version of each cache that was deleted, for the hosts that weren't there then.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable
from typing import Any

from insitu.base.spec import CacheSpec, CopyState, NodeId, PlacedCopy

SCHEMA_VERSION = 2

_PLACEMENT = """
CREATE TABLE placement (
    cache TEXT NOT NULL, version INTEGER NOT NULL, partition INTEGER NOT NULL, node TEXT NOT NULL,
    state TEXT NOT NULL, position INTEGER NOT NULL, PRIMARY KEY (cache, version, partition, node))
    WITHOUT ROWID;
CREATE TABLE stores (store TEXT PRIMARY KEY, node TEXT NOT NULL);
"""
_DELETED = "CREATE TABLE IF NOT EXISTS deleted (cache TEXT PRIMARY KEY, version INTEGER NOT NULL)"
_SCHEMA = f"""
CREATE TABLE versions (
    cache TEXT NOT NULL, version INTEGER NOT NULL, latest INTEGER NOT NULL, spec TEXT NOT NULL,
    crc32 INTEGER NOT NULL, PRIMARY KEY (cache, version));
CREATE TABLE pins (
    cache TEXT NOT NULL, version INTEGER NOT NULL, job TEXT NOT NULL, PRIMARY KEY (cache, version, job));
{_PLACEMENT}
PRAGMA user_version = {SCHEMA_VERSION};
"""


def read_schema_version(database: sqlite3.Connection) -> int:
    """Return the version of the tables; 0 if there are none yet."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return int(version)


def bring_up_to_date(database: sqlite3.Connection) -> None:
    """Make the tables in an empty database, or move what an older insitu wrote into today's.

    Belongs into a transaction. Raises ValueError, KeyError, TypeError or AttributeError if an entry can't be
    trusted.
    """
    version = read_schema_version(database)
    if version == 0:
        _execute(database, _SCHEMA)
    elif version == 1:
        rows = database.execute("SELECT cache, version, latest, spec, crc32 FROM versions").fetchall()
        specs = [(decode_with_owners(text, crc32), latest) for _, _, latest, text, crc32 in rows]
        _execute(database, f"DELETE FROM versions; {_PLACEMENT} PRAGMA user_version = {SCHEMA_VERSION}")
        for spec, latest in specs:
            insert_version(database, spec, latest=bool(latest))


def record_deleted(database: sqlite3.Connection, cache: str) -> None:
    """Write down that the versions that a cache has now are deleted. Belongs into a transaction."""
    database.execute(_DELETED)  # catalogues of the same format that are older lack it
    highest = "SELECT cache, MAX(version) FROM versions WHERE cache = ? GROUP BY cache"
    database.execute(f"INSERT OR REPLACE INTO deleted {highest}", (cache,))


def select_deleted(database: sqlite3.Connection) -> dict[str, int]:
    """Return the highest version that was deleted of each cache."""
    found = "SELECT 1 FROM sqlite_master WHERE name = 'deleted'"
    if database.execute(found).fetchone() is None:
        return {}
    return {cache: int(version) for cache, version in database.execute("SELECT * FROM deleted")}


def _execute(database: sqlite3.Connection, script: str) -> None:
    # `executescript` would end the transaction.
    for statement in filter(str.strip, script.split(";")):
        database.execute(statement)


def insert_version(database: sqlite3.Connection, cache: CacheSpec, *, latest: bool) -> None:
    """Add one version and the places of its partitions, all live."""
    data = cache.to_json()
    for partition in data["partitions"]:
        del partition["owners"]
    text = json.dumps(data)
    row = (cache.name, cache.version, int(latest), text, zlib.crc32(text.encode()))
    database.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", row)
    copies = [PlacedCopy(p.index, owner) for p in cache.partitions for owner in p.owners]
    write_placement(database, cache.name, cache.version, copies)


def select_versions(
    database: sqlite3.Connection, where: str, values: tuple[str | int, ...]
) -> list[CacheSpec]:
    """Return the versions that an SQL condition on `versions` chooses, with the owners of today.

    Raises ValueError, KeyError, TypeError or AttributeError if an entry can't be trusted.
    """
    query = f"SELECT cache, version, spec, crc32 FROM versions {where}"
    rows = database.execute(query, values).fetchall()
    if read_schema_version(database) == 1:
        return [decode_with_owners(text, crc32) for _, _, text, crc32 in rows]
    return [
        _decode(text, crc32, owners_by_partition(select_placement(database, cache, version)))
        for cache, version, text, crc32 in rows
    ]


def select_placement(database: sqlite3.Connection, cache: str, version: int) -> list[PlacedCopy]:
    """Return the copies of a version by partition, each partition's primary owner first."""
    query = (
        "SELECT partition, node, state FROM placement WHERE cache = ? AND version = ? "
        "ORDER BY partition, position, node"
    )
    rows = database.execute(query, (cache, version))
    return [PlacedCopy(partition, NodeId(node), state) for partition, node, state in rows]


def owners_by_partition(copies: Iterable[PlacedCopy]) -> dict[int, tuple[NodeId, ...]]:
    """Return the nodes of each partition's live copies, in the order of `copies`: the primary owner first.

    If no copy is live, the lost ones stand for them, so that an error names the nodes that are missed.
    """
    found: dict[int, dict[CopyState, list[NodeId]]] = {}
    for copy in copies:
        found.setdefault(copy.partition, {}).setdefault(copy.state, []).append(copy.node)
    return {index: tuple(states.get("live") or states.get("lost") or ()) for index, states in found.items()}


def write_placement(
    database: sqlite3.Connection, cache: str, version: int, copies: Iterable[PlacedCopy]
) -> None:
    """Replace the placement of a version. The order of a partition's copies is kept."""
    database.execute("DELETE FROM placement WHERE cache = ? AND version = ?", (cache, version))
    rows = [(cache, version, c.partition, c.node, c.state, i) for i, c in enumerate(copies)]
    database.executemany("INSERT INTO placement VALUES (?, ?, ?, ?, ?, ?)", rows)


def decode_with_owners(text: str, crc32: int) -> CacheSpec:
    """Return a version whose specification names the owners, as the first catalogues had it."""
    return CacheSpec.from_json(_load(text, crc32))


def _decode(text: str, crc32: int, owners: dict[int, tuple[NodeId, ...]]) -> CacheSpec:
    data = _load(text, crc32)
    for partition in data["partitions"]:
        partition["owners"] = owners.get(partition["index"], ())
    return CacheSpec.from_json(data)


def _load(text: str, crc32: int) -> Any:
    if zlib.crc32(text.encode()) != crc32:
        raise ValueError("its checksum differs")
    return json.loads(text)
