"""Pure: collections, maps and arrays of objects, as lists of numbers, tensors or JSON text.

Lists of numbers of one type are read many at once. All else is read value by value: numbers as those of
NumPy, so that their types are known, objects as dicts of their fields, maps as lists of keys with values.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import SourceError
from insitu.extensions.ignite.objects import (
    ABSENT,
    ObjectFields,
    follow_handles,
    gather_codes,
    gather_numbers,
    locate_objects,
)
from insitu.extensions.ignite.protocol import BinaryType
from insitu.extensions.ignite.rows import Buffer, Positions
from insitu.extensions.ignite.values import (
    ARRAYS,
    NUMBERS,
    TENSOR,
    Leaf,
    are_sql_dates,
    find_missing,
    spread,
)
from insitu.extensions.ignite.wire import (
    BINARY_ENUM,
    BOOL,
    COLLECTION,
    DATES,
    DECIMAL,
    DECIMALS,
    ENUM,
    ENUMS,
    FIXED_BYTES,
    HANDLE,
    MAP,
    NULL,
    OBJECT,
    OBJECTS,
    OPTIMIZED,
    STRING,
    STRINGS,
    TIMES,
    TIMESTAMP,
    TIMESTAMPS,
    UUID,
    UUIDS,
    WRAPPED,
    Malformed,
    Reader,
    end_of_value,
    name_of_code,
)
from insitu.grid.partitions import is_ragged

TypeLookup = Callable[[int], BinaryType]
LISTS = (COLLECTION, OBJECTS, STRINGS, UUIDS, DATES, DECIMALS, TIMESTAMPS, TIMES, ENUMS)
"""Types whose values are some elements, each with a type code."""
_TYPED = (OBJECTS, ENUMS)
"""Those of them that name the class of their elements."""
_DEEPEST = 64


# Lists of numbers, many at once


def find_elements(buffer: Buffer, lists: Positions, codes: Sequence[int]) -> tuple[Positions, Positions]:
    """Return (where the first element of each list begins, how many it has). `codes` are those of the lists.

    Raises Malformed if the elements aren't there.
    """
    heads = lists + 1
    kinds = np.asarray(codes)
    typed = np.flatnonzero(np.isin(kinds, _TYPED))
    if len(typed):
        unnamed = gather_numbers(buffer, heads[typed], "i4") != 0
        heads[typed] += 4
        named = typed[~unnamed]  # a text follows
        heads[named] += 5 + gather_numbers(buffer, heads[named] + 1, "i4")
    counts = gather_numbers(buffer, heads, "i4").astype(np.int64)
    firsts = heads + 4 + (kinds == COLLECTION)
    if (counts < 0).any() or (firsts + counts > len(buffer)).any():
        raise Malformed("a list is cut off")
    return firsts, counts


def place_elements(firsts: Positions, counts: Positions, size: int) -> Positions:
    """Return where each element begins, of all lists end to end: elements of `size` bytes."""
    before = np.cumsum(counts) - counts
    places: Positions = np.repeat(firsts - before * size, counts) + np.arange(counts.sum()) * size
    return places


def find_number_code(buffer: Buffer, firsts: Positions, counts: Positions) -> int | None:
    """Return the type code that all elements of all lists have, if it is that of a number; NULL if there are
    no elements, and None for others."""
    filled = counts > 0
    codes = np.unique(gather_codes(buffer, firsts[filled]))
    if not len(codes):
        return NULL
    code = int(codes[0])
    if len(codes) > 1 or code not in NUMBERS:
        return None
    size = FIXED_BYTES[code]
    if (firsts + counts * size > len(buffer)).any():
        return None
    found = gather_codes(buffer, place_elements(firsts, counts, size))
    return code if (found == code).all() else None


def decode_lists(buffer: Buffer, positions: Positions, leaf: Leaf, type_of: TypeLookup) -> Any:
    """Return the lists of a leaf as a Block holds them. Raises as `decode_leaf`."""
    places, codes = locate_lists(buffer, positions)
    missing = find_missing(codes, leaf)
    places, column = places[~missing], leaf.column
    if leaf.form == TENSOR:
        values = read_all(buffer, places, type_of, column.name)
        return spread(read_tensors(values, column.dtype, column.shape, column.name), missing, leaf)
    firsts, counts = find_elements(buffer, places, codes[~missing].tolist())
    if find_number_code(buffer, firsts, counts) not in (leaf.element, NULL):
        raise SourceError(
            f"All lists of column {column.name} must hold {name_of_code(leaf.element)}. Received: one with "
            f"other values, or null. Keep them as text with --dtype {column.name}=json"
        )
    elements = place_elements(firsts, counts, FIXED_BYTES[leaf.element]) + 1
    if leaf.element == BOOL:
        flat = gather_numbers(buffer, elements, "u1") != 0
    else:
        dtype = np.dtype(NUMBERS[leaf.element])
        flat = np.ascontiguousarray(gather_numbers(buffer, elements, dtype.str[1:]), dtype)
    if is_ragged(column):
        offsets = np.concatenate(([0], np.cumsum(counts))) * flat.itemsize
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
        return spread(pa.Array.from_buffers(pa.large_binary(), len(places), buffers), missing, leaf)
    different = counts != math.prod(column.shape)
    if different.any():
        raise SourceError(
            f"All rows of column {column.name} must be of one shape. Received: "
            f"{column.dtype}{list(column.shape)} and {name_of_code(leaf.code)} of "
            f"{int(counts[different][0])} elements. Pad them to one length, or import them as they are with "
            f"--ragged {column.name}"
        )
    return spread(flat.reshape(len(places), *column.shape), missing, leaf)


# Any values, one by one


class NestedReader:
    """Reads single values. Raises Malformed, SourceError, and UnknownSchema as `ObjectFields` does."""

    def __init__(self, buffer: Buffer, type_of: TypeLookup, name: str) -> None:
        """`name` is the column, for messages."""
        self._buffer, self._type_of, self._name = buffer, type_of, name
        self._data = buffer.data

    def read(self, position: int, depth: int = 0) -> Any:
        """Return the value at a position. Null is None."""
        if depth > _DEEPEST:
            raise SourceError(
                f"Values are at most {_DEEPEST} deep in each other. Received: deeper ones in column "
                f"{self._name}, or an object that leads back to one that holds it. Leave the column out with "
                f"--without {self._name}"
            )
        reader = Reader(self._data, position)
        code = reader.read_byte()
        if code == NULL:
            return None
        if code == HANDLE:
            target = position - reader.read_int()
            if not 0 <= target < position:
                raise Malformed("a handle leads to what doesn't stand before it")
            return self.read(target, depth + 1)
        if code in (OBJECT, WRAPPED):
            return self._read_object(position, depth)
        if code in LISTS or code == MAP:
            return self._read_elements(position, code, depth)
        return self._read_plain(reader, code, position)

    def _read_plain(self, reader: Reader, code: int, position: int) -> Any:
        if code in NUMBERS:
            dtype = np.dtype(NUMBERS[code])
            return np.frombuffer(reader.take(FIXED_BYTES[code] - 1), dtype.newbyteorder("<"))[0]
        if code in ARRAYS:
            dtype = np.dtype(ARRAYS[code])
            count = reader.read_count(dtype.itemsize)
            return np.frombuffer(reader.take(count * dtype.itemsize), dtype.newbyteorder("<"))
        if code == STRING:
            return bytes(reader.take(reader.read_count())).decode()
        if code == UUID:
            return str(uuid.UUID(reader.read_raw_uuid()))
        if code in (ENUM, BINARY_ENUM):
            if reader.read_int() == 0:
                reader.read_string()
            return np.int32(reader.read_int())
        if code == TIMESTAMP:
            return reader.read_long() * 10**6 + reader.read_int()
        if code == DECIMAL:
            scale = reader.read_int()
            data = bytearray(reader.take(reader.read_count()))
            sign = -1 if data and data[0] & 0x80 else 1
            data[:1] = bytes([data[0] & 0x7F]) if data else b""
            return Decimal(f"{sign * int.from_bytes(data, 'big')}E{-scale}")
        if code == OPTIMIZED and are_sql_dates(self._buffer, np.array([position])):
            return int(
                gather_numbers(self._buffer, np.array([end_of_value(self._data, position) - 8]), "i8")[0]
            )
        raise SourceError(
            f"Values in lists, maps and objects are numbers, text, times, UUIDs, enums, or such lists, maps "
            f"and objects. Received: {name_of_code(code)} in column {self._name}. Leave the column out with "
            f"--without {self._name}"
        )

    def _read_elements(self, position: int, code: int, depth: int) -> list[Any]:
        if code == MAP:
            reader = Reader(self._data, position + 1)
            count, place = 2 * reader.read_count(2), position + 6
        else:
            firsts, counts = find_elements(self._buffer, np.array([position]), [code])
            count, place = int(counts[0]), int(firsts[0])
        found = []
        for _ in range(count):
            found.append(self.read(place, depth + 1))
            place = end_of_value(self._data, place)
        if code == MAP:
            return [[key, value] for key, value in zip(found[::2], found[1::2], strict=True)]
        return found

    def _read_object(self, position: int, depth: int) -> dict[str, Any]:
        (place,) = locate_objects(self._buffer, np.array([position]), "value").tolist()
        objects = ObjectFields(self._buffer, np.array([place]), self._type_of)
        kind = self._type_of(int(objects.types[0]))
        found = {}
        for part in sorted(kind.fields, key=lambda part: part.name):
            (field,) = objects.locate(part.number).tolist()
            if field != ABSENT:
                found[part.name] = self.read(field, depth + 1)
        return found


def find_tensor(values: Sequence[Any]) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and the shape that all of some nested lists of numbers have; None for others."""
    found = {_describe(value) for value in values}
    form = found.pop() if len(found) == 1 else None
    return form if form is not None and form[1] and 0 not in form[1] else None


def _describe(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and the shape of a value; None if it is no tensor."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.newbyteorder("=").name, value.shape
    if not isinstance(value, list) or not value:
        return None
    inner = {_describe(each) for each in value}
    form = inner.pop() if len(inner) == 1 else None
    return None if form is None else (form[0], (len(value), *form[1]))


def read_tensors(values: Sequence[Any], dtype: str, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """Return nested lists of numbers as one array [values, *shape]. Raises SourceError for another form."""
    found = np.zeros((len(values), *shape), dtype)
    for row, value in enumerate(values):
        form = _describe(value)
        if form != (dtype, shape):
            what = "lists of others" if form is None else f"{form[0]}{list(form[1])}"
            raise SourceError(
                f"All rows of column {name} must be of one type and shape. Received: {dtype}{list(shape)} "
                f"and {what}. Keep them as text with --dtype {name}=json"
            )
        found[row] = value
    return found


def read_all(buffer: Buffer, positions: Positions, type_of: TypeLookup, name: str) -> list[Any]:
    """Return the values at some positions; None for what is absent."""
    reader = NestedReader(buffer, type_of, name)
    return [None if place < 0 else reader.read(place) for place in positions.tolist()]


def locate_lists(buffer: Buffer, positions: Positions) -> tuple[Positions, npt.NDArray[np.uint8]]:
    """Return where each value begins, also one to which a handle leads, and its type code; NULL if absent."""
    found = follow_handles(buffer, positions)
    return found, gather_codes(buffer, found)
