"""How the rows of the catalogue's tables are keys of etcd.

`versions/NAME@VERSION` says whether a version is the latest, and in how many pieces its specification is
stored, which never changes: `specs/NAME@VERSION/NUMBER`. `placement/NAME@VERSION/GROUP` has the copies of
some partitions, so that one that moves rewrites little. All rows of each other table are one key.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "catalog/"
_VERSIONS = f"{PREFIX}versions/"
_TABLES = {"pins": "cache, version, job", "stores": "store, node", "deleted": "cache, version"}
"""Tables that are a key each, with their columns."""
_GROUP = 2048
"""Partitions whose copies are one key."""
_PIECE_BYTES = 400_000
_ONE_VERSION = "WHERE cache = ? AND version = ?"


def key_expressions(row: str) -> dict[str, str]:
    """Return the expression of SQL for the key of a row, by table."""
    name = f"{row}.cache || '@' || {row}.version"
    keys = {table: f"'{PREFIX}{table}'" for table in _TABLES}
    keys["versions"] = f"'{_VERSIONS}' || {name}"
    keys["placement"] = f"'{PREFIX}placement/' || {name} || '/' || ({row}.partition / {_GROUP})"
    return keys


def find_step(key: str, *, is_put: bool) -> int:
    """Return in which step a key is changed if one transaction can't hold all: 0 adds copies, 1 adds and
    removes versions, 2 removes copies and specifications. So no version is ever without its copies."""
    if key.startswith(_VERSIONS) or key.removeprefix(PREFIX) in _TABLES:
        return 1
    return 0 if is_put else 2


def encode_row(database: sqlite3.Connection, key: str) -> bytes | None:
    """Return what etcd holds under a key; None: nothing."""
    kind, _, name = key.removeprefix(PREFIX).partition("/")
    if kind in _TABLES:
        return _pack(database.execute(f"SELECT {_TABLES[kind]} FROM {kind} ORDER BY 1, 2").fetchall())
    if kind == "versions":
        found = database.execute(f"SELECT latest, crc32, spec FROM versions {_ONE_VERSION}", _split(name))
        row = found.fetchone()
        return None if row is None else json.dumps([row[0], row[1], len(_cut(row[2]))]).encode()
    name, _, group = name.rpartition("/")
    first = int(group) * _GROUP
    rows = database.execute(
        f"SELECT partition, node, state FROM placement {_ONE_VERSION} AND partition >= ? AND partition < ? "
        f"ORDER BY partition, position, node",
        (*_split(name), first, first + _GROUP),
    ).fetchall()
    return _pack(rows) if rows else None


def split_spec(database: sqlite3.Connection, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values of the specification of a version, whose key it is; nothing for others."""
    name = key.removeprefix(_VERSIONS)
    if name != key:
        row = database.execute(f"SELECT spec FROM versions {_ONE_VERSION}", _split(name)).fetchone()
        for number, piece in enumerate(_cut(row[0])):
            yield _spec_key(name, number), piece


def list_spec_keys(key: str, value: bytes) -> list[str]:
    """Return the keys of the specification of a version, by its own key; none for others."""
    name = key.removeprefix(_VERSIONS)
    return [] if name == key else [_spec_key(name, number) for number in range(json.loads(value)[2])]


def insert_records(database: sqlite3.Connection, records: Mapping[str, bytes]) -> None:
    """Replace all rows by those of etcd. Raises ValueError, KeyError, TypeError, sqlite3.Error."""
    for table in ("versions", "placement", *_TABLES):
        database.execute(f"DELETE FROM {table}")
    for key, value in records.items():
        kind, _, name = key.removeprefix(PREFIX).partition("/")
        if kind in _TABLES:
            marks = ", ".join("?" * len(_TABLES[kind].split(",")))
            database.executemany(f"INSERT INTO {kind} ({_TABLES[kind]}) VALUES ({marks})", _unpack(value))
        elif kind == "versions":
            latest, crc32, pieces = json.loads(value)
            spec = b"".join(records[_spec_key(name, number)] for number in range(pieces))
            row = (*_split(name), latest, _decompress(spec).decode(), crc32)
            columns = "cache, version, latest, spec, crc32"
            database.execute(f"INSERT INTO versions ({columns}) VALUES (?, ?, ?, ?, ?)", row)
        elif kind == "placement":
            cache, version = _split(name.rpartition("/")[0])
            rows = [(cache, version, *copy, number) for number, copy in enumerate(_unpack(value))]
            columns = "cache, version, partition, node, state, position"
            database.executemany(f"INSERT INTO placement ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)


def _split(name: str) -> tuple[str, int]:
    cache, _, version = name.rpartition("@")
    return cache, int(version)


def _spec_key(name: str, number: int) -> str:
    return f"{PREFIX}specs/{name}/{number}"


def _cut(spec: str) -> list[bytes]:
    data = zlib.compress(spec.encode())
    return [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]


def _pack(rows: Any) -> bytes:
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode())


def _unpack(value: bytes) -> list[list[Any]]:
    return list(json.loads(_decompress(value)))


def _decompress(value: bytes) -> bytes:
    try:
        return zlib.decompress(value)
    except zlib.error as error:
        raise ValueError(str(error)) from error
