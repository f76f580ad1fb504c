"""Rows in Ignite's binary format, written by tests, as columns."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from ignite_wire import number

from insitu.base.spec import Column
from insitu.extensions.ignite.fields import decode_rows, find_fields
from insitu.extensions.ignite.protocol import BinaryType, CacheConfiguration
from insitu.extensions.ignite.rows import find_rows
from insitu.grid.sources import ColumnOptions, SourceOptions

CONFIGURATION = CacheConfiguration("CACHE", "PARTITIONED", 0, "", "", frozenset())
SQL_DATE_HEAD = b"\xfe\x0f\x00\x00\x00f:\xde\xd5@\x97f"
"""How Ignite 2.17 writes a java.sql.Date before its milliseconds."""


def key(index: int) -> bytes:
    return number(4, "q", index)


def read(
    values: Sequence[bytes],
    types: Sequence[BinaryType] = (),
    options: ColumnOptions | None = None,
    ragged: Sequence[str] = (),
    configuration: CacheConfiguration = CONFIGURATION,
    keys: Callable[[int], bytes] = key,
) -> tuple[dict[str, Column], dict[str, Any]]:
    """The columns and the values of a cache with these values."""
    data = b"".join(keys(i) + value for i, value in enumerate(values))
    rows = find_rows(data, len(values))
    known = {kind.number: kind for kind in types}
    fields = find_fields(
        rows,
        configuration,
        known.__getitem__,
        options or ColumnOptions(),
        SourceOptions(ragged_columns=frozenset(ragged)),
    )
    return {column.name: column for column in fields.columns}, decode_rows(fields, rows, known.__getitem__)


def decimal_bytes(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    magnitude = int("".join(map(str, digits)))
    data = bytearray(magnitude.to_bytes(magnitude.bit_length() // 8 + 1, "big"))
    data[0] |= 0x80 if sign else 0
    return bytes([30]) + struct.pack("<ii", -int(exponent), len(data)) + bytes(data)
