"""Pure: fields of the tables in which Arrow describes files and messages (FlatBuffers, little-endian)."""

from __future__ import annotations

import struct


def find_root(data: bytes) -> int:
    """Return the byte at which the outermost table begins. Raises ValueError."""
    return _unpack("<I", data, 0)


def find_field(data: bytes, table: int, number: int) -> int:
    """Return the byte at which a field of a table lies; 0 where it is left out. Raises ValueError."""
    vtable = table - _unpack("<i", data, table)
    if vtable < 0:
        raise ValueError("a table begins before its buffer")
    entry = 4 + 2 * number
    field = _unpack("<H", data, vtable + entry) if entry < _unpack("<H", data, vtable) else 0
    return table + field if field else 0


def follow(data: bytes, position: int) -> int:
    """Return the byte to which the field at `position` points. Raises ValueError."""
    return position + _unpack("<I", data, position)


def find_vector(data: bytes, position: int) -> tuple[int, int]:
    """Return (first byte, items) of the vector to which the field at `position` points. Raises ValueError.

    The items may go beyond the end of `data`.
    """
    vector = follow(data, position)
    return vector + 4, _unpack("<I", data, vector)


def _unpack(form: str, data: bytes, position: int) -> int:
    try:
        return int(struct.unpack_from(form, data, position)[0])
    except struct.error as error:
        raise ValueError(str(error)) from error
