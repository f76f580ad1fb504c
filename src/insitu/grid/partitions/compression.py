"""Blocks whose columns are compressed one by one, as Arrow's format describes it.

Each buffer of a block begins with the int64 number of its bytes without compression, or -1 if it is stored as
it is. Any reader of Arrow files can read that. A column is compressed if a block of it shrinks by a tenth or
more. The first block and each `_TRIED_AGAIN`th one after it are tried; the others do as the last one that was
tried.

Between the last block and the footer is a table, which readers of Arrow pass over: for each buffer of each
block the bytes that it takes in the file and without compression. So columns are found without reading the
bytes before them, and the memory that they need is known before they are read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.spec import Column
from insitu.grid.partitions.format import (
    BlockMark,
    column_buffers,
    file_order,
    is_variable,
    row_bytes,
    write_mark,
)
from insitu.grid.partitions.ipc_message import (
    BUFFER,
    TAIL_BYTES,
    fill_template,
    find_vector_of_places,
    footer_bytes,
)

_TRIED_AGAIN = 64
_WORTH = 0.9
"""Part of its bytes that a column may have at most after compression, to be compressed."""
_LENGTH_BYTES = 8
"""At the beginning of each buffer: its bytes without compression."""
_PLAIN = struct.pack("<q", -1)
_TABLE_TAIL = struct.Struct("<II")
"""Ends the table of sizes: the CRC-32 of the places of the blocks and the table, and zeros."""

Sizes = npt.NDArray[np.int64]
"""int64[blocks, buffers, 2]: (bytes in the file without what fills up to 8, bytes without compression)."""


@dataclass(frozen=True, slots=True)
class CompressedBlock:
    """A block as it is written."""

    #: Bytes before the body.
    metadata: bytes
    #: The body, in pieces.
    pieces: list[memoryview]
    #: (CRC-32, bytes) of each column in the body, in the order of the file.
    sums: list[tuple[int, int]]


class BlockCompressor:
    """Compresses the blocks of one new partition, one after the other, and keeps account of them."""

    def __init__(self, columns: tuple[Column, ...], codec: str, template: bytes) -> None:
        """`codec` is a name of `spec.CODECS`. `template` is the metadata of any compressed block."""
        self._columns = columns
        self._codec = pa.Codec(codec)
        self._template = template
        self._slots, self._slot_count = buffer_slots(columns)
        self._compressed = [True] * len(columns)
        self._places: list[tuple[int, int, int]] = []
        self._sizes: list[list[tuple[int, int]]] = []

    def encode(self, plain: bytes, values: Mapping[str, Any]) -> CompressedBlock:
        """Return the next block. `plain` is its metadata without compression; `values`: see `make_batch`."""
        number, pieces, sums, sizes = len(self._sizes), [], [], []
        buffers = np.zeros(self._slot_count, BUFFER)
        end = 0
        for index, column in enumerate(file_order(self._columns)):
            crc32, begin = 0, end
            stored = self._store(index, column_buffers(column, values[column.name]))
            for slot, (parts, raw_bytes) in zip(self._slots[index], stored, strict=True):
                size = sum(map(len, parts))
                buffers[slot] = (end, size)
                sizes.append((size, raw_bytes))
                for piece in (*parts, memoryview(bytes(-size % 8))):
                    crc32, end = zlib.crc32(piece, crc32), end + len(piece)
                    pieces.append(piece)
            sums.append((crc32, end - begin))
        # Arrow leaves no buffer's place at 0 behind others; readers want ascending ones.
        buffers["offset"] = np.maximum.accumulate(buffers["offset"])
        metadata = fill_template(self._template, plain, buffers, end)
        write_mark(metadata, BlockMark(number, tuple(crc32 for crc32, _ in sums)))
        self._sizes.append(sizes)
        return CompressedBlock(bytes(metadata), [piece for piece in pieces if len(piece)], sums)

    def _store(self, index: int, parts: list[memoryview]) -> list[tuple[list[memoryview], int]]:
        """Return (pieces, bytes without compression) of each buffer of a column."""
        raw = sum(map(len, parts))
        tried = self._compressed[index] or len(self._sizes) % _TRIED_AGAIN == 0
        stored = [_store_buffer(self._codec if tried else None, part) for part in parts]
        if len(self._sizes) % _TRIED_AGAIN == 0:
            self._compressed[index] = sum(len(piece) for pieces in stored for piece in pieces) <= _WORTH * raw
            if not self._compressed[index]:
                stored = [_store_buffer(None, part) for part in parts]
        return [(pieces, len(part)) for pieces, part in zip(stored, parts, strict=True)]

    def record_place(self, offset: int, metadata_bytes: int, body_bytes: int) -> None:
        """Take down the place in the file of the block that was encoded last."""
        self._places.append((offset, metadata_bytes, body_bytes))

    def complete(self, end: bytes) -> bytes:
        """Return the end of the file, made of the one that Arrow writes behind blocks at other places."""
        data = bytearray(end)
        tail = len(data) - TAIL_BYTES
        start = tail - footer_bytes(end[tail:], len(end))
        first, count = find_vector_of_places(end[start:tail])
        for number, place in enumerate(self._places):
            struct.pack_into("<qi4xq", data, start + first + 24 * number, *place)
        table = np.array(self._sizes, dtype="<i8").tobytes()
        crc32 = zlib.crc32(table, zlib.crc32(data[start + first : start + first + 24 * count]))
        return bytes(data[:start] + table + _TABLE_TAIL.pack(crc32, 0) + data[start:])

    @property
    def column_bytes(self) -> list[tuple[int, int]]:
        """(bytes without compression, bytes in the file) of each column, in the order of the columns."""
        sums = dict.fromkeys((column.name for column in self._columns), (0, 0))
        if self._sizes:
            totals = np.array(self._sizes, dtype=np.int64).sum(axis=0)
            for column, held in zip(file_order(self._columns), buffers_by_column(self._columns), strict=True):
                stored, raw = totals[held].sum(axis=0).tolist()
                sums[column.name] = (raw, stored)
        return [sums[column.name] for column in self._columns]


def _store_buffer(codec: Any, part: memoryview) -> list[memoryview]:
    """Return a buffer as it is stored, compressed by `codec` unless it is None or makes it no smaller."""
    if not len(part):
        return []
    if codec is not None:
        packed = memoryview(codec.compress(part)).cast("B")
        if len(packed) < len(part):
            return [memoryview(struct.pack("<q", len(part))), packed]
    return [memoryview(_PLAIN), part]


def decompress(codec: Any, stored: memoryview, raw_bytes: int, out: npt.NDArray[np.uint8]) -> None:
    """Decompress a buffer of a file into `out`, which has `raw_bytes`. Raises ValueError.

    No more than `raw_bytes` of memory are taken, whatever the buffer says.
    """
    if not raw_bytes and not len(stored):
        return
    try:
        (length,) = struct.unpack_from("<q", stored)
        if length == -1 and len(stored) == _LENGTH_BYTES + raw_bytes:
            out[:] = np.frombuffer(stored, np.uint8)[_LENGTH_BYTES:]
        elif length == raw_bytes:
            found = codec.decompress(stored[_LENGTH_BYTES:], raw_bytes)
            out[:] = np.frombuffer(found, np.uint8)
        else:
            raise ValueError(f"a buffer of {length} bytes was expected to have {raw_bytes}")
    except (struct.error, pa.ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"it can't be decompressed ({error})") from error


def read_sizes(
    data: bytes, places: npt.NDArray[Any], columns: tuple[Column, ...], rows: Sequence[int], most: int
) -> Sizes:
    """Return the sizes of all buffers of a file's blocks. Raises ValueError if they can't be right.

    `data` is the table of sizes, see `table_bytes`; `rows` are the rows of each block. All buffers together
    have `most` bytes without compression, or fewer.
    """
    blocks, buffers = len(places), sum(map(len, buffers_by_column(columns)))
    if len(data) != table_bytes(blocks, columns):
        raise ValueError("it is too short for the sizes of its columns")
    body = len(data) - _TABLE_TAIL.size
    if zlib.crc32(data[:body], zlib.crc32(places.tobytes())) != _TABLE_TAIL.unpack_from(data, body)[0]:
        raise ValueError("the sizes of its columns are damaged")
    sizes: Sizes = np.frombuffer(data, "<i8", blocks * buffers * 2).reshape(blocks, buffers, 2)
    # Each number by itself first, so that no sum overflows.
    limit = np.append(places["body_bytes"], 0).max()
    if not ((sizes >= 0) & (sizes <= np.array([limit, most]))).all() or float(sizes[..., 1].sum()) > most:
        raise ValueError("the sizes of its columns can't be right")
    if (padded(sizes[..., 0]).sum(axis=1) != places["body_bytes"]).any():
        raise ValueError("the sizes of its columns aren't those of its blocks")
    for column, held in zip(file_order(columns), buffers_by_column(columns), strict=True):
        expected = np.array(rows, dtype=np.int64) * (row_bytes(column) or 8)
        expected = expected + 8 if is_variable(column) else expected
        if (sizes[:, held[0], 1] != expected).any():
            raise ValueError(f"the sizes of its column {column.name!r} aren't those of its rows")
    return sizes


def table_bytes(blocks: int, columns: tuple[Column, ...]) -> int:
    """Return the bytes of the table of sizes, which is before the footer."""
    return 16 * blocks * sum(map(len, buffers_by_column(columns))) + _TABLE_TAIL.size


def padded(sizes: Sizes) -> Sizes:
    """Return sizes with the zeros that follow a buffer up to a multiple of 8 bytes."""
    return sizes + -sizes % 8


def buffers_by_column(columns: tuple[Column, ...]) -> list[list[int]]:
    """Return the numbers of each column's buffers, counted over a block, in the order of the file."""
    found, end = [], 0
    for column in file_order(columns):
        count = 2 if is_variable(column) else 1
        found.append(list(range(end, end + count)))
        end += count
    return found


def buffer_slots(columns: tuple[Column, ...]) -> tuple[list[list[int]], int]:
    """Return the indices of each column's buffers among those that Arrow names of a block, and their number.

    Arrow names a bitmap of nulls, too, which is empty: one for a column, a further one for a tensor's values.
    """
    slots, end = [], 0
    for column in file_order(columns):
        first = end + (2 if column.shape else 1)
        end = first + (2 if is_variable(column) else 1)
        slots.append(list(range(first, end)))
    return slots, end
