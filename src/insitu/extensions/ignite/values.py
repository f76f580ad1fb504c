"""Pure: values of one type, many at once, as a column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.extensions.ignite.objects import AlignedFields, gather, gather_codes, gather_numbers
from insitu.extensions.ignite.rows import Buffer, Positions
from insitu.extensions.ignite.wire import (
    BINARY_ENUM,
    BOOL,
    BOOLS,
    BYTE,
    BYTES,
    CHAR,
    CHARS,
    DATE,
    DECIMAL,
    DOUBLE,
    DOUBLES,
    ENUM,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LONG,
    LONGS,
    NULL,
    OPTIMIZED,
    SHORT,
    SHORTS,
    STRING,
    TIME,
    TIMESTAMP,
    UUID,
    Malformed,
    hash_name,
    name_of_code,
    pack_int,
)
from insitu.grid.partitions import TEXT, is_ragged, value_dtype

NUMBERS: Mapping[int, str] = {
    BYTE: "int8",
    SHORT: "int16",
    INT: "int32",
    LONG: "int64",
    FLOAT: "float32",
    DOUBLE: "float64",
    CHAR: "uint16",
    BOOL: "bool",
    DATE: "int64",
    TIME: "int64",
}
"""Types whose values are one number after the type code, and the dtypes of their columns."""
ARRAYS: Mapping[int, str] = {
    BYTES: "uint8",
    SHORTS: "int16",
    INTS: "int32",
    LONGS: "int64",
    FLOATS: "float32",
    DOUBLES: "float64",
    CHARS: "uint16",
    BOOLS: "bool",
}
"""Types whose values are a count and so many numbers."""
_LONG_TEXT = 128
"""Bytes of a mean text from which on texts are copied one by one."""
_EXACT_POWERS = np.array([10.0**exponent for exponent in range(23)])
"""The powers of ten that a float64 holds exactly."""
_MOST_DECIMAL_BYTES = 1000
_MOST_MILLISECONDS = (2**63 - 1) // 10**6 - 1
_SQL_DATE_BYTES = 15
_SQL_DATE_HEAD = bytes([OPTIMIZED]) + pack_int(_SQL_DATE_BYTES) + b"f" + pack_int(hash_name("java.sql.Date"))
"""How a java.sql.Date begins, which Ignite has Java serialize. The checksum of its class and the milliseconds
follow."""


JSON, TENSOR = "json", "tensor"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column, or with Arrow several ones, that the values at one place of each row make."""

    #: The path of field names, joined by dots.
    name: str
    #: The type code of all values that aren't null.
    code: int
    #: The column. Of Arrow data: the dtype is "uint8[*]", and the column isn't part of the cache.
    column: Column
    #: Of an enum: the number of its class.
    enum: int = 0
    #: What takes the place of null; None: null is refused.
    fill: Any = None
    #: Of Arrow data: the columns that it holds.
    arrow: tuple[Column, ...] = ()
    #: The type code of the elements of a list of numbers.
    element: int = 0
    #: How values are read one by one: as JSON, whatever their types, or as TENSOR, of lists in lists; empty:
    #: they aren't.
    form: str = ""
    #: The column that says which values were missing; None: none does.
    mask: Column | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the cache that it makes."""
        return self.arrow or ((self.column,) if self.mask is None else (self.column, self.mask))


class MissingValues(Exception):
    """Raised where values are null that have nothing to take their place. `rows` are theirs."""

    def __init__(self, name: str, rows: Positions) -> None:
        super().__init__(name)
        self.name, self.rows = name, rows


def decode_leaf(buffer: Buffer, positions: Positions, leaf: Leaf) -> Any:
    """Return the values of a leaf as a Block holds them; Arrow data as large binaries.

    Raises SourceError for values of another type or shape, Malformed, and MissingValues.
    """
    codes = gather_codes(buffer, positions)
    codes[codes == BINARY_ENUM] = ENUM
    if (codes == leaf.code).all():
        return _convert(buffer, positions, leaf)
    missing = find_missing(codes, leaf)
    return spread(_convert(buffer, positions[~missing], leaf), missing, leaf)


def find_missing(codes: npt.NDArray[np.uint8], leaf: Leaf) -> npt.NDArray[np.bool_]:
    """Return which values are null. Raises SourceError for values of another type, and MissingValues."""
    other = codes[(codes != leaf.code) & (codes != NULL)]
    if len(other):
        raise SourceError(
            f"Values of column {leaf.name} must be of one type. Received: {name_of_code(leaf.code)} and "
            f"{name_of_code(int(other[0]))}. Store one type, keep them as text with "
            f"--dtype {leaf.name}=json, or leave the column out with --without {leaf.name}"
        )
    missing: npt.NDArray[np.bool_] = codes == NULL
    if missing.any() and leaf.fill is None:
        raise MissingValues(leaf.name, np.flatnonzero(missing))
    return missing


def spread(present: Any, missing: npt.NDArray[np.bool_], leaf: Leaf) -> Any:
    """Return the values that are there, and what takes the place of those that are missing, in order."""
    if not missing.any():
        return present
    if leaf.column.dtype == TEXT or is_ragged(leaf.column):
        places = np.cumsum(~missing) - 1
        taken = present.take(pa.array(places, pa.int64(), mask=missing))
        return pc.fill_null(taken, pa.scalar(leaf.fill, present.type))
    filled = np.full((len(missing), *leaf.column.shape), leaf.fill, leaf.column.dtype)
    filled[~missing] = present
    return filled


def decode_aligned(aligned: AlignedFields, field: int, leaf: Leaf) -> Any:
    """Return the values of a leaf as `decode_leaf` does, of a field that is side by side."""
    if leaf.code in NUMBERS:
        # Of a bool any byte but 0 is true.
        kind = "u1" if leaf.code == BOOL else np.dtype(NUMBERS[leaf.code]).str[1:]
        values = aligned.read(field, leaf.code, kind)
        if values is not None:
            return values != 0 if leaf.code == BOOL else _native(values)
    return decode_leaf(aligned.buffer, aligned.locate(field), leaf)


def _convert(buffer: Buffer, positions: Positions, leaf: Leaf) -> Any:
    """Return the values at `positions`, all of which are there and of the leaf's type."""
    code, column = leaf.code, leaf.column
    if code == BOOL:
        return gather_numbers(buffer, positions + 1, "u1") != 0
    if code in NUMBERS:
        return _native(gather_numbers(buffer, positions + 1, np.dtype(NUMBERS[code]).str[1:]))
    if code == STRING:
        texts = _join(buffer, positions, 1, pa.large_utf8())
        texts.validate(full=True)
        return texts
    if code in ARRAYS:
        return _arrays(buffer, positions, leaf)
    if code == ENUM:
        if (gather_numbers(buffer, positions + 1, "i4") != leaf.enum).any():
            raise SourceError(
                f"All enums of column {column.name} must be of the class that those of the first rows are "
                f"of, whose numbers mean the same. Received: one of another class. Store one class, or leave "
                f"the column out with --without {column.name}"
            )
        return _native(gather_numbers(buffer, positions + 5, "i4"))
    if code == UUID:
        halves = gather(buffer, positions + 1, 16).view(np.uint8).reshape(len(positions), 2, 8)
        return np.ascontiguousarray(halves[:, :, ::-1]).reshape(len(positions), 16)
    if code == OPTIMIZED:
        if not are_sql_dates(buffer, positions):
            raise SourceError(
                f"Values of column {column.name} must be of one type. Received: Date and "
                f"{name_of_code(OPTIMIZED)}. Store one type, or leave the column out with "
                f"--without {column.name}"
            )
        return _native(gather_numbers(buffer, positions + len(_SQL_DATE_HEAD) + 2, "i8"))
    if code == TIMESTAMP:
        return _timestamps(buffer, positions, column.name)
    if code == DECIMAL:
        return _decimals(buffer, positions, column.name)
    raise AssertionError(code)


def are_sql_dates(buffer: Buffer, positions: Positions) -> bool:
    """Return whether all values, which Java itself has serialized, are dates of SQL."""
    if (gather_numbers(buffer, positions + 1, "i4") != _SQL_DATE_BYTES).any():
        return False
    heads = gather(buffer, positions, len(_SQL_DATE_HEAD))
    return bool((heads == np.frombuffer(_SQL_DATE_HEAD, heads.dtype)).all())


def _native(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("="))


def read_lengths(buffer: Buffer, positions: Positions, size: int) -> Positions:
    """Return how many elements of `size` bytes each value has. Raises Malformed if they aren't there."""
    lengths = gather_numbers(buffer, positions + 1, "i4").astype(np.int64)
    if (lengths < 0).any() or (positions + 5 + lengths * size > len(buffer)).any():
        raise Malformed("a text or an array is cut off")
    return lengths


def _arrays(buffer: Buffer, positions: Positions, leaf: Leaf) -> Any:
    column, kind = leaf.column, np.dtype(ARRAYS[leaf.code])
    if is_ragged(column):
        if leaf.code == BOOLS:  # any byte but 0 is true
            return _join(buffer, positions, 1, pa.large_binary(), as_bools=True)
        return _join(buffer, positions, kind.itemsize, pa.large_binary())
    lengths = read_lengths(buffer, positions, kind.itemsize)
    dtype = value_dtype(column)
    size = dtype.itemsize * math.prod(column.shape)
    different = lengths * kind.itemsize != size
    if different.any():
        raise SourceError(
            f"All rows of column {column.name} must be of one shape. Received: "
            f"{column.dtype}{list(column.shape)} and {name_of_code(leaf.code)} of "
            f"{int(lengths[different][0])} elements. Pad them to one length, or import them as they are with "
            f"--ragged {column.name}"
        )
    values = gather(buffer, positions + 5, size)
    if dtype == np.bool_:
        return (values.view(np.uint8) != 0).reshape(len(positions), *column.shape)
    return _native(values.view(dtype.newbyteorder("<"))).reshape(len(positions), *column.shape)


def _join(buffer: Buffer, positions: Positions, size: int, kind: Any, *, as_bools: bool = False) -> Any:
    """Return the contents of texts or arrays as an Arrow array, end to end."""
    lengths = read_lengths(buffer, positions, size) * size
    starts = positions + 5
    if not as_bools and (positions[1:] >= (starts + lengths)[:-1]).all():
        return _take_between(buffer, starts, lengths, kind)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    total = int(offsets[-1])
    if total > _LONG_TEXT * len(positions):
        view = buffer.data
        ends = (starts + lengths).tolist()
        data: Any = b"".join([view[a:b] for a, b in zip(starts.tolist(), ends, strict=True)])
        flat = np.frombuffer(data, np.uint8)
    else:
        flat = buffer[np.repeat(starts - offsets[:-1], lengths) + np.arange(total)]
    if as_bools:
        flat = (flat != 0).view(np.uint8)
    return pa.Array.from_buffers(kind, len(positions), [None, pa.py_buffer(offsets), pa.py_buffer(flat)])


def _take_between(buffer: Buffer, starts: Positions, lengths: Positions, kind: Any) -> Any:
    """Return the bytes [starts[i], starts[i] + lengths[i]), which follow each other, as an Arrow array."""
    bounds = np.empty(2 * len(starts), np.int64)
    bounds[::2], bounds[1::2] = starts, starts + lengths
    # What is wanted and what is between in turn: every other binary is wanted.
    turns = pa.Array.from_buffers(
        pa.large_binary(), max(0, len(bounds) - 1), [None, pa.py_buffer(bounds), pa.py_buffer(buffer)]
    )
    # Arrow copies them, so that an array's first offset is 0 and no other bytes are kept.
    return turns.take(pa.array(np.arange(0, len(bounds), 2))).view(kind)


def _timestamps(buffer: Buffer, positions: Positions, name: str) -> npt.NDArray[np.int64]:
    """Return nanoseconds since 1970."""
    milliseconds = _native(gather_numbers(buffer, positions + 1, "i8"))
    if len(milliseconds) and (
        int(milliseconds.max()) > _MOST_MILLISECONDS or int(milliseconds.min()) < -_MOST_MILLISECONDS
    ):
        raise SourceError(
            f"Timestamps must be in [1678, 2262), as nanoseconds of 64 bits. Received: column {name} with "
            f"{int(np.abs(milliseconds).max())} milliseconds from 1970. Store them as Date, or leave the "
            f"column out with --without {name}"
        )
    nanoseconds: npt.NDArray[np.int64] = milliseconds * 10**6 + gather_numbers(buffer, positions + 9, "i4")
    return nanoseconds


def _decimals(buffer: Buffer, positions: Positions, name: str) -> npt.NDArray[np.float64]:
    """Return the float64 nearest to each decimal.

    A decimal is a scale, and bytes of which the highest bit is the sign and the others are the magnitude.
    """
    scales = gather_numbers(buffer, positions + 1, "i4").astype(np.int64)
    lengths = read_lengths(buffer, positions + 4, 1)
    if (lengths < 1).any():
        raise Malformed("a decimal without digits")
    first = gather_numbers(buffer, positions + 9, "u1")
    sign = np.where(first & 0x80, -1.0, 1.0)
    magnitude = (first & 0x7F).astype(np.int64)
    for place in range(1, min(7, int(lengths.max(initial=0)))):
        longer = np.flatnonzero(lengths > place)
        magnitude[longer] = magnitude[longer] * 256 + gather_numbers(
            buffer, positions[longer] + 9 + place, "u1"
        )
    exact = (lengths <= 7) & (magnitude < 2**53) & (scales >= 0) & (scales < len(_EXACT_POWERS))
    values: npt.NDArray[np.float64] = sign * magnitude / _EXACT_POWERS[np.where(exact, scales, 0)]
    for row in np.flatnonzero(~exact):
        values[row] = sign[row] * _large_decimal(buffer, int(positions[row]), int(scales[row]), name)
    return values


def _large_decimal(buffer: Buffer, position: int, scale: int, name: str) -> float:
    length = int.from_bytes(buffer[position + 5 : position + 9].tobytes(), "little")
    value = math.inf
    if length <= _MOST_DECIMAL_BYTES:
        data = bytearray(buffer[position + 9 : position + 9 + length].tobytes())
        data[0] &= 0x7F
        value = float(f"{int.from_bytes(data, 'big')}E{-scale}")
    if math.isinf(value):
        raise SourceError(
            f"Decimals must be smaller than 1.8e308, the largest float64, and have at most 2,400 digits. "
            f"Received: column {name} with a larger one. Leave it out with --without {name}"
        )
    return value
