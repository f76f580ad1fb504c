"""Pure: where each row of a page begins, without a Python object for each where rows are of one length."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.extensions.ignite.wire import (
    ELEMENT_BYTES,
    FIXED_BYTES,
    OBJECT,
    WRAPPED,
    Malformed,
    end_of_value,
)

Positions = npt.NDArray[np.int64]
Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they came: `data` holds keys and values in turn."""

    #: The bytes.
    data: Buffer
    #: Where each key begins.
    keys: Positions
    #: Where each value begins.
    values: Positions
    #: Where each value ends.
    ends: Positions


def find_rows(data: bytes | bytearray | memoryview, count: int) -> Rows:
    """Return the `count` rows that `data` consists of. Raises Malformed if they don't fill it."""
    buffer = np.frombuffer(data, np.uint8)
    if not count:
        if len(buffer):
            raise Malformed(f"{len(buffer)} bytes follow the last row")
        none = np.empty(0, np.int64)
        return Rows(buffer, none, none, none)
    equal = _find_equal_rows(buffer, data, count)
    return (
        equal
        or _scan_objects(buffer, data, count)
        or _walk_objects(buffer, data, count)
        or _walk(buffer, data, count)
    )


def _find_equal_rows(buffer: Buffer, data: Any, count: int) -> Rows | None:
    """Return rows that all have the length of the first one, by induction; None where they don't."""
    middle = end_of_value(data, 0)
    length = end_of_value(data, middle)
    if length * count != len(buffer):
        return None
    table = buffer.reshape(count, length)
    for start in (0, middle):
        for begin, end in _parts_that_say_length(data, start):
            if not (table[:, begin:end] == table[0, begin:end]).all():
                return None
    keys = np.arange(count, dtype=np.int64) * length
    return Rows(buffer, keys, keys + middle, keys + length)


def _parts_that_say_length(data: Any, position: int) -> list[tuple[int, int]]:
    """Return the ranges of a value's bytes from which its length follows."""
    code = data[position]
    if code in FIXED_BYTES:
        return [(position, position + 1)]
    if code in ELEMENT_BYTES or code == WRAPPED:
        return [(position, position + 5)]
    if code == OBJECT:
        return [(position, position + 1), (position + 12, position + 16)]
    return [(position, end_of_value(data, position))]


_INT = struct.Struct("<i")
_LEAST_OBJECT = 24
"""Bytes of the header of an object."""
_LENGTHS = {OBJECT: (12, 0), WRAPPED: (1, 9)}
"""Where an object, and one in a wrapper, says its length, and how many bytes there are beside that."""
_WRAPPER_BYTES = 5
"""Bytes of a wrapper before the object in it."""
_LEAST_SCANNED, _MOST_SCANNED_BYTES = 64, 512
"""How many rows, and how short ones in the mean, make it worth while to look at all bytes."""
_SCANNED_AT_ONCE = 1 << 16
"""Bytes that are looked at in memory that the processor's cache holds."""


def _scan_objects(buffer: Buffer, data: Any, count: int) -> Rows | None:
    """Return rows as `_walk_objects` does, if all values are objects of one class; None for others.

    All bytes that look like the beginning of such an object are found at once. If they follow each other
    without a gap, each where the one before says that it ends, they are the rows.
    """
    code, total = int(buffer[0]), len(buffer)
    key = FIXED_BYTES.get(code)
    if count < _LEAST_SCANNED or total > count * _MOST_SCANNED_BYTES:
        return None
    if key is None or key >= total or buffer[key] not in _LENGTHS:
        return None
    kind = int(buffer[key])
    place, more = _LENGTHS[kind]
    inner = more and _WRAPPER_BYTES
    last = total - _LEAST_OBJECT + 1
    cuts = range(0, last, _SCANNED_AT_ONCE)
    found = np.concatenate(
        [np.flatnonzero(buffer[a : min(a + _SCANNED_AT_ONCE, last)] == OBJECT) + a for a in cuts]
    )
    everywhere: npt.NDArray[np.int32] = np.ndarray((total - 3,), "<i4", buffer, strides=(1,))
    classes = everywhere[found + 4]
    values = found[classes == _INT.unpack_from(data, min(key + inner + 4, total - 4))[0]] - inner
    if len(values) != count or values[0] != key:
        return None
    ends = values + more + everywhere[values + place]
    keys = values - key
    if int(ends[-1]) != total or (ends[:-1] != keys[1:]).any() or (ends - values < _LEAST_OBJECT).any():
        return None
    if (buffer[values] != kind).any() or (buffer[keys] != code).any():
        return None
    return Rows(buffer, keys, values, ends)


def _walk_objects(buffer: Buffer, data: Any, count: int) -> Rows | None:
    """Return rows whose values are objects and whose keys are of one fixed length; None for others."""
    view, code = memoryview(data), int(buffer[0])
    key = FIXED_BYTES.get(code)
    if key is None or key >= len(buffer) or buffer[key] not in _LENGTHS:
        return None
    kind, total, unpack = int(buffer[key]), len(buffer), _INT.unpack_from
    place, more = _LENGTHS[kind]
    position, found = key, []
    try:
        for _ in range(count):
            found.append(position)
            position += key + more + unpack(view, position + place)[0]
    except (struct.error, OverflowError):
        return None
    values = np.array(found, dtype=np.int64)
    keys = values - key
    ends = np.append(keys[1:], total)
    if position - key != total or (ends - values < _LEAST_OBJECT).any():
        return None
    if (buffer[values] != kind).any() or (buffer[keys] != code).any():
        return None
    return Rows(buffer, keys, values, ends)


def _walk(buffer: Buffer, data: Any, count: int) -> Rows:
    """Return rows of any lengths, found one after another."""
    found = []
    position, total, unpack = 0, len(buffer), _INT.unpack_from
    fixed, elements = FIXED_BYTES, ELEMENT_BYTES
    view = memoryview(data)
    try:
        for _ in range(2 * count):
            found.append(position)
            code = view[position]
            if code == OBJECT:
                length = unpack(view, position + 12)[0]
                if length < _LEAST_OBJECT:
                    raise Malformed(f"an object of {length} bytes at {position}")
                position += length
            elif code == WRAPPED:
                length = unpack(view, position + 1)[0]
                if length < _LEAST_OBJECT:
                    raise Malformed(f"an object of {length} bytes at {position}")
                position += 9 + length
            elif code in fixed:
                position += fixed[code]
            elif code in elements:
                length = unpack(view, position + 1)[0]
                if length < 0:
                    raise Malformed(f"{length} elements at {position}")
                position += 5 + length * elements[code]
            else:
                position = end_of_value(view, position)
    except (struct.error, IndexError):
        raise Malformed(f"row {len(found) // 2} of {count} is cut off") from None
    if position != total:
        raise Malformed(f"{count} rows take {position} of {total} bytes")
    positions = np.array(found, dtype=np.int64)
    keys, values = positions[::2], positions[1::2]
    return Rows(buffer, keys, values, np.append(keys[1:], total))
