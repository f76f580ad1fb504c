"""Pure: the metadata of a record batch as Arrow writes it, and how it is made for compressed buffers.

pyarrow compresses all buffers of a batch or none. The format allows each buffer to be as it is, too. So
Arrow describes one small compressed batch, and the numbers in its description are then replaced.

The metadata of a message is a FlatBuffers table (`Message` of Arrow's Message.fbs) behind 8 bytes: a mark,
and the int32 length of the table. Its header is a table (`RecordBatch`) with a vector of a struct for each
node (int64 rows, int64 nulls), and one for each buffer (int64 offset in the body, int64 bytes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PREFIX_BYTES = 8
"""Before the table: four bytes of ones, int32 bytes of the table."""
BUFFER = np.dtype([("offset", "<i8"), ("bytes", "<i8")])
"""The place of one buffer in the body."""
_NODE_BYTES = 16
_HEADER, _BODY_BYTES = 2, 3
"""Numbers of fields in the table `Message`."""
_ROWS, _NODES, _BUFFERS = 0, 1, 2
"""Numbers of fields in the table `RecordBatch`."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of the numbers of a batch in the metadata of its message."""

    #: The byte of the body's length.
    body_bytes: int
    #: The byte of the number of rows.
    rows: int
    #: (first byte, how many) of the nodes.
    nodes: tuple[int, int]
    #: (first byte, how many) of the buffers.
    buffers: tuple[int, int]


def _find_places(table: bytes) -> _Places:
    root = find_root(table)
    header_field = find_field(table, root, _HEADER)
    if not header_field:
        raise ValueError("a message has no header")
    header = follow(table, header_field)
    fields = [find_field(table, header, number) for number in (_ROWS, _NODES, _BUFFERS)]
    body_bytes = find_field(table, root, _BODY_BYTES)
    if not all(fields) or not body_bytes:
        raise ValueError("a message lacks what a batch with rows has")
    nodes, buffers = find_vector(table, fields[1]), find_vector(table, fields[2])
    if max(nodes[0] + nodes[1] * _NODE_BYTES, buffers[0] + buffers[1] * BUFFER.itemsize) > len(table):
        raise ValueError("a message names more buffers than it holds")
    return _Places(body_bytes, fields[0], nodes, buffers)


def read_buffers(table: bytes) -> npt.NDArray[Any]:
    """Return the places of the buffers that the table of a message names: BUFFER[n]. Raises ValueError.

    They may be damaged.
    """
    start, count = _find_places(table).buffers
    return np.frombuffer(table, BUFFER, count, start)


def fill_template(template: bytes, plain: bytes, buffers: npt.NDArray[Any], body_bytes: int) -> bytearray:
    """Return the metadata `template`, of a batch with compressed buffers, for another batch.

    `plain` is the metadata of the other batch without compression; `buffers` are the places of its buffers,
    compressed, in a body of `body_bytes`. Raises ValueError unless both have as many columns.
    """
    made, source = bytearray(template), plain[PREFIX_BYTES:]
    to, of = _find_places(template[PREFIX_BYTES:]), _find_places(source)
    if to.nodes[1] != of.nodes[1] or not to.buffers[1] == of.buffers[1] == len(buffers):
        raise ValueError(f"a template of {to.nodes[1]} columns doesn't fit a batch of {of.nodes[1]}")
    nodes = source[of.nodes[0] : of.nodes[0] + of.nodes[1] * _NODE_BYTES]
    for place, data in (
        (to.body_bytes, struct.pack("<q", body_bytes)),
        (to.rows, source[of.rows : of.rows + 8]),
        (to.nodes[0], nodes),
        (to.buffers[0], buffers.astype(BUFFER).tobytes()),
    ):
        made[PREFIX_BYTES + place : PREFIX_BYTES + place + len(data)] = data
    return made


# Pure: fields of the tables in which Arrow describes files and messages (FlatBuffers, little-endian)


def find_root(data: bytes) -> int:
    """Return the byte at which the outermost table begins. Raises ValueError."""
    return _unpack("<I", data, 0)


def find_field(data: bytes, table: int, number: int) -> int:
    """Return the byte at which a field of a table begins; 0 if it is left out. Raises ValueError."""
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


# Pure: locates the record batches of an Arrow IPC file by its footer, without reading them.
#
# pyarrow gives batches by number, but not their places. The footer is a FlatBuffers table (`Footer` of
# Arrow's File.fbs) with a vector of one struct for each batch: int64 offset, int32 bytes of the metadata, 4
# bytes of padding, int64 bytes of the body


MAGIC = b"ARROW1"
TAIL_BYTES = 4 + len(MAGIC)
"""At the end of the file: int32 bytes of the footer, the magic word."""
PLACE = np.dtype(
    {
        "names": ["offset", "metadata_bytes", "body_bytes"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
"""The place of one batch: the message begins at `offset`, its body `metadata_bytes` later."""
_RECORD_BATCHES = 3
"""The number of the field in the table `Footer`."""


def footer_bytes(tail: bytes, file_bytes: int) -> int:
    """Return the length of the footer, which ends TAIL_BYTES before the end of the file. Raises ValueError.

    `tail` are the file's last TAIL_BYTES.
    """
    if len(tail) != TAIL_BYTES or tail[4:] != MAGIC:
        raise ValueError("its end isn't that of an Arrow file")
    (size,) = struct.unpack("<i", tail[:4])
    if not 0 < size <= file_bytes - TAIL_BYTES:
        raise ValueError(f"its footer has {size} bytes in a file of {file_bytes}")
    return int(size)


def read_places(footer: bytes, body_end: int) -> npt.NDArray[Any]:
    """Return the places of all batches, in their order: PLACE[n]. Raises ValueError.

    Each is in [0, body_end), where `body_end` is the byte of the file at which the footer begins, and none
    overlaps with another.
    """
    start, count = find_vector_of_places(footer)
    places = np.frombuffer(footer, PLACE, count, start) if count else np.empty(0, PLACE)
    # Each number by itself first, so that no sum overflows.
    within = all(((places[name] >= 0) & (places[name] <= body_end)).all() for name in PLACE.names or ())
    ends = places["offset"] + places["metadata_bytes"] + places["body_bytes"]
    if not within or (ends > np.append(places["offset"][1:], body_end)[: len(places)]).any():
        raise ValueError("its footer gives places of blocks that can't be right")
    return places


def find_vector_of_places(footer: bytes) -> tuple[int, int]:
    """Return (first byte, places) of the vector `recordBatches` of a footer. Raises ValueError."""
    try:
        field = find_field(footer, find_root(footer), _RECORD_BATCHES)
        start, count = find_vector(footer, field) if field else (0, 0)
    except ValueError as error:
        raise ValueError(f"its footer is damaged ({error})") from error
    if start + count * PLACE.itemsize > len(footer):
        raise ValueError(f"its footer names {count} blocks, more than it holds")
    return start, count
