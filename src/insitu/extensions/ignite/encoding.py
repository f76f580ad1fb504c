"""Pure: columns as values of Ignite's binary format, many rows at once.

A value of all rows is a `Piece`: bytes of each row. An object is its header, its fields and a footer with the
place of each field; the class with this one schema is given to the cluster before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.extensions.ignite.objects import HEADER_BYTES
from insitu.extensions.ignite.protocol import BinaryType, Field
from insitu.extensions.ignite.wire import (
    BOOL,
    BOOLS,
    BYTE,
    BYTES,
    DOUBLE,
    DOUBLES,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LONG,
    LONGS,
    OBJECT,
    SHORT,
    SHORTS,
    STRING,
    hash_name,
)
from insitu.grid.partitions import TEXT, is_ragged, text_buffers

_USER_TYPE, _HAS_SCHEMA, _ONE_BYTE, _TWO_BYTES, _COMPACT = 0x01, 0x02, 0x08, 0x10, 0x20
_FNV_OFFSET, _FNV_PRIME = 0x811C9DC5, 0x01000193
_NUMBERS: Mapping[str, tuple[int, str]] = {
    "int8": (BYTE, "<i1"),
    "uint8": (SHORT, "<i2"),
    "int16": (SHORT, "<i2"),
    "uint16": (INT, "<i4"),
    "int32": (INT, "<i4"),
    "uint32": (LONG, "<i8"),
    "int64": (LONG, "<i8"),
    "float16": (FLOAT, "<f4"),
    "float32": (FLOAT, "<f4"),
    "float64": (DOUBLE, "<f8"),
    "bool": (BOOL, "?"),
}
"""dtype of a number -> (type code, dtype that is written): Java's smallest type that holds all its values."""
_ARRAYS: Mapping[str, tuple[int, str]] = {
    "int8": (BYTES, "<i1"),
    "uint8": (BYTES, "<u1"),
    "int16": (SHORTS, "<i2"),
    "uint16": (INTS, "<i4"),
    "int32": (INTS, "<i4"),
    "uint32": (LONGS, "<i8"),
    "int64": (LONGS, "<i8"),
    "float16": (FLOATS, "<f4"),
    "float32": (FLOATS, "<f4"),
    "float64": (DOUBLES, "<f8"),
    "bool": (BOOLS, "?"),
}
"""The same of arrays; of bytes the bits are kept."""
_KEYS = (BYTE, SHORT, INT, LONG, STRING)

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of each row, one row after the other."""

    #: All bytes.
    data: Bytes
    #: How many each row has.
    lengths: Counts

    @classmethod
    def of_equal(cls, rows: Bytes) -> Piece:
        """Return a piece whose rows are those of an array [rows, bytes]."""
        return cls(rows.reshape(-1), np.full(len(rows), rows.shape[1], np.int64))


def join(pieces: Sequence[Piece]) -> Piece:
    """Return the bytes of all pieces of the first row, then those of the second one, and so on."""
    lengths: Counts = np.asarray(np.sum([piece.lengths for piece in pieces], axis=0, dtype=np.int64))
    out = np.empty(int(lengths.sum()), np.uint8)
    places: Counts = np.cumsum(lengths) - lengths
    for piece in pieces:
        _scatter(out, places, piece)
        places = places + piece.lengths
    return Piece(out, lengths)


def _scatter(out: Bytes, places: Counts, piece: Piece) -> None:
    """Copy the bytes of each row of a piece to its place."""
    rows = len(piece.lengths)
    if not rows or not len(piece.data):
        return
    size, gap = int(piece.lengths[0]), int(places[1] - places[0]) if rows > 1 else 0
    if (piece.lengths == size).all() and (np.diff(places) == gap).all():
        strides = (max(gap, size), 1)
        room = np.lib.stride_tricks.as_strided(out[int(places[0]) :], (rows, size), strides)
        room[:] = piece.data.reshape(rows, size)
        return
    firsts = np.cumsum(piece.lengths) - piece.lengths
    out[np.repeat(places - firsts, piece.lengths) + np.arange(len(piece.data))] = piece.data


def _as_bytes(values: npt.NDArray[Any]) -> Bytes:
    """Return the bytes of each row, as an array [rows, bytes]."""
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return flat.view(np.uint8) if flat.size else np.zeros((len(values), 0), np.uint8)


def _headed(code: int, counts: Counts | None, rows: int) -> Bytes:
    """Return the type code and, unless it is None, the count of elements of each value."""
    head = np.empty((rows, 1 if counts is None else 5), np.uint8)
    head[:, 0] = code
    if counts is not None:
        head[:, 1:] = counts.astype("<i4").reshape(-1, 1).view(np.uint8)
    return head


def find_code(column: Column) -> int:
    """Return the type code that the values of a column get. Raises InputError."""
    if column.dtype == TEXT:
        return STRING
    table = _ARRAYS if column.shape else _NUMBERS
    if is_ragged(column) or column.dtype not in table:
        raise InputError(
            f"A column that is exported holds numbers of at most 64 signed bits, arrays of one shape, or "
            f"text. Received: {column.name} of {column.dtype}. Leave it out with --without {column.name}"
        )
    return table[column.dtype][0]


def encode_column(column: Column, values: Any) -> Piece:
    """Return the values of a column, each with its type code."""
    code = find_code(column)
    if code == STRING:
        texts = pa.array(list(values), pa.large_string())
        offsets, data = text_buffers(texts)
        lengths = np.diff(offsets).astype(np.int64)
        head = Piece.of_equal(_headed(code, lengths, len(lengths)))
        return join([head, Piece(np.asarray(data[offsets[0] : offsets[-1]]).view(np.uint8), lengths)])
    array = np.asarray(values)
    if not column.shape:
        written = array.astype(_NUMBERS[column.dtype][1])
        return Piece.of_equal(np.hstack([_headed(code, None, len(array)), _as_bytes(written)]))
    written = array.astype(_ARRAYS[column.dtype][1], copy=False).reshape(len(array), -1)
    counts = np.full(len(array), written.shape[1])
    return Piece.of_equal(np.hstack([_headed(code, counts, len(array)), _as_bytes(written)]))


def check_key(column: Column) -> None:
    """Raise InputError unless a column can be keys of Ignite."""
    if column.shape or find_code(column) not in _KEYS:
        raise InputError(
            f"--key must be a column of whole numbers or text, one a row. Received: {column.name} of "
            f"{column.dtype}{list(column.shape) if column.shape else ''}"
        )


def schema_number(fields: Sequence[int]) -> int:
    """Return the id of a schema, as Ignite makes it: FNV-1a over the numbers of its fields."""
    value = _FNV_OFFSET
    for field in fields:
        for byte in (field & 0xFFFFFFFF).to_bytes(4, "little"):
            value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The class of objects, and what their fields are."""

    #: The class.
    kind: BinaryType
    #: Of each field in order: the column that it comes from, or the objects that it has.
    fields: tuple[Column | ObjectLayout, ...]

    @property
    def kinds(self) -> list[BinaryType]:
        """All classes, those of fields first."""
        inner = [kind for field in self.fields if isinstance(field, ObjectLayout) for kind in field.kinds]
        return [*inner, self.kind]

    def encode(self, values: Mapping[str, Any]) -> Piece:
        """Return an object of each row. `values` are those of the columns, by name."""
        return encode_objects(
            self.kind,
            [
                field.encode(values)
                if isinstance(field, ObjectLayout)
                else encode_column(field, values[field.name])
                for field in self.fields
            ],
        )


def lay_out(name: str, columns: Sequence[Column], prefix: str = "") -> ObjectLayout:
    """Return the layout of objects of class `name` with a field for each column. Raises InputError.

    Columns `meta.width` and `meta.height` are fields of an object in field `meta`, of class NAME.meta. All
    names begin with `prefix`.
    """
    groups: dict[str, list[Column]] = {}
    for column in columns:
        groups.setdefault(column.name.removeprefix(prefix).partition(".")[0], []).append(column)
    fields: list[Column | ObjectLayout] = []
    found: list[Field] = []
    for title, members in groups.items():
        whole = next((column for column in members if column.name == prefix + title), None)
        if whole is not None and len(members) > 1:
            raise InputError(
                f"A field of Ignite is a value or an object. Received: columns "
                f"{', '.join(column.name for column in members)}. Leave some out with --without"
            )
        fields.append(whole or lay_out(f"{name}.{title}", members, f"{prefix}{title}."))
        code = OBJECT if whole is None else find_code(whole)
        found.append(Field(title, code, hash_name(title.lower())))
    numbers = tuple(field.number for field in found)
    if len(set(numbers)) != len(numbers):
        raise InputError(
            f"Ignite tells fields apart by their names in lower case. Received: "
            f"{', '.join(groups)}. Leave one of two alike out with --without"
        )
    kind = BinaryType(hash_name(name.lower()), name, tuple(found), {schema_number(numbers): numbers})
    return ObjectLayout(kind, tuple(fields))


def hash_contents(contents: Piece) -> npt.NDArray[np.uint32]:
    """Return Java's `Arrays.hashCode` of each row's bytes, which a binary object has in its header."""
    lengths = contents.lengths
    powers = np.ones(int(lengths.max(initial=0)) + 1, np.uint32)
    powers[1:] = 31
    powers = np.multiply.accumulate(powers, dtype=np.uint32)
    found = powers[lengths]
    filled = np.flatnonzero(lengths)
    if len(filled):
        ends = np.cumsum(lengths)
        behind = np.repeat(ends, lengths) - 1 - np.arange(len(contents.data))
        products = contents.data.view(np.int8).astype(np.int32).view(np.uint32) * powers[behind]
        found[filled] += np.add.reduceat(products, (ends - lengths)[filled], dtype=np.uint32)
    return found


def encode_objects(kind: BinaryType, fields: Sequence[Piece]) -> Piece:
    """Return an object of each row, whose fields are `fields` in the order of the class."""
    contents = join(fields)
    rows = len(contents.lengths)
    sizes = np.stack([field.lengths for field in fields])
    places = HEADER_BYTES + np.cumsum(sizes, axis=0) - sizes
    footer, widths = _write_footer(places)
    head = np.zeros(
        rows,
        [
            *(("code", "u1"), ("version", "u1"), ("flags", "<u2"), ("type", "<i4"), ("hash", "<u4")),
            *(("length", "<i4"), ("schema", "<i4"), ("footer", "<i4")),
        ],
    )
    head["code"], head["version"] = OBJECT, 1
    head["flags"] = _USER_TYPE | _HAS_SCHEMA | _COMPACT | np.array([0, _ONE_BYTE, _TWO_BYTES, 0, 0])[widths]
    head["type"], head["schema"] = kind.number, next(iter(kind.schemas))
    head["hash"] = hash_contents(contents)
    head["footer"] = HEADER_BYTES + contents.lengths
    head["length"] = HEADER_BYTES + contents.lengths + footer.lengths
    return join([Piece.of_equal(head.view(np.uint8).reshape(rows, -1)), contents, footer])


def _write_footer(places: Counts) -> tuple[Piece, Counts]:
    """Return the places of the fields, and how many bytes each takes in each row: 1, 2 or 4, as Java writes
    them. `places[f]` are those of field f in each row."""
    last = places[-1]
    widths: Counts = np.where(last < 1 << 8, 1, np.where(last < 1 << 16, 2, 4)).astype(np.int64)
    whole = np.ascontiguousarray(places.T.astype("<u4")).view(np.uint8).reshape(len(last), len(places), 4)
    kept = np.broadcast_to(np.arange(4) < widths[:, None, None], whole.shape)
    return Piece(whole[kept], widths * len(places)), widths
