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

from insitu.grid.partitions.flat_tables import find_field, find_root, find_vector, follow

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
    """Where the numbers of a batch lie in the metadata of its message."""

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
