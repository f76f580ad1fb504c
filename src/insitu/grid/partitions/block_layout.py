"""Decides the places of the columns of a partition's blocks, and checks that their bytes are as written.

Only what has a checksum is believed: Arrow's own metadata of a block, which has none, might point anywhere.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import CorruptPartition, UnreadablePartition
from insitu.base.spec import Column
from insitu.grid.partitions.format import (
    column_offsets,
    file_order,
    find_mark,
    is_variable,
    row_bytes,
    value_type,
)


class BlockLayout:
    """Chosen columns of the blocks of one partition that isn't compressed."""

    def __init__(
        self,
        path: Path,
        places: npt.NDArray[Any],
        rows: int,
        block_rows: int,
        all_columns: tuple[Column, ...],
        columns: Sequence[Column],
    ) -> None:
        """`places` are as in `ipc_footer.PLACE`. `columns` are chosen out of `all_columns`."""
        self.path = path
        self._places = places
        self._rows = rows
        self._block_rows = block_rows
        self._all = all_columns
        self._chosen = [column.name for column in columns]
        self._has_text = any(map(is_variable, columns))

    def offset(self, block: int) -> int:
        """Return the byte of the file at which the block begins."""
        return int(self._places[block]["offset"])

    def size(self, block: int) -> int:
        """Return the bytes of memory that the block takes."""
        place = self._places[block]
        return int(place["metadata_bytes"]) + int(place["body_bytes"])

    def body_start(self, block: int) -> int:
        """Return the offset of the body in this memory."""
        return int(self._places[block]["metadata_bytes"])

    def column_starts(self, block: int) -> dict[str, int]:
        """Return the offset of each column of fixed size in this memory."""
        offsets = column_offsets(self._all, self._rows_of(block))
        return {name: self.body_start(block) + offset for name, offset in offsets.items()}

    def _rows_of(self, block: int) -> int:
        return min(self._block_rows, self._rows - block * self._block_rows)

    def is_like(self, other: BlockLayout) -> bool:
        """Return whether blocks have the same places in the other file, which nothing but its bytes says."""
        return bool(np.array_equal(self._places, other._places))

    def check(self, block: int, view: memoryview) -> None:
        """Raise CorruptPartition unless the chosen columns of a block, all of which is in `view`, have the
        checksums that its metadata gives."""
        sums = self._read_mark(block, view[: self.body_start(block)])
        for column, crc32, (first, end) in zip(
            file_order(self._all), sums, self._column_ranges(block, view), strict=True
        ):
            if column.name in self._chosen and zlib.crc32(view[first:end]) != crc32:
                raise make_corrupt_error(self.path, f"column {column.name!r} of its block {block} is damaged")

    def _read_mark(self, block: int, metadata: memoryview) -> tuple[int, ...]:
        """Return the CRC-32 of each column, in the order of the file. Raises CorruptPartition."""
        mark = find_mark(bytes(metadata))
        if mark is None or mark.number != block or len(mark.crc32) != len(self._all):
            raise make_corrupt_error(self.path, f"the metadata of its block {block} is damaged")
        return mark.crc32

    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any:
        """Return a column of texts or lists of a block in `memory`, as an Arrow array, in place."""
        ranges = self._column_ranges(block, view_of(memory))
        names = [column.name for column in file_order(self._all)]
        start, stop = ranges[names.index(name)]
        offsets_end = start + 8 * (self._rows_of(block) + 1)
        offsets, data = memory[start:offsets_end], memory[offsets_end:stop]
        kind = next(value_type(column) for column in self._all if column.name == name)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, self._rows_of(block), buffers)

    def _column_ranges(self, block: int, view: memoryview) -> list[tuple[int, int]]:
        """Return the place of each column, in the order of the file; of text, as a damaged block may say."""
        ranges, end, rows = [], self.body_start(block), self._rows_of(block)
        for column in file_order(self._all):
            start, end = end, end + -(-rows * row_bytes(column) // 8) * 8
            if is_variable(column) and self._has_text:
                end = start + 8 * (rows + 1)
                if end > len(view):
                    raise make_corrupt_error(self.path, f"its block {block} is too short for its rows")
                (bytes_of_text,) = struct.unpack("<q", view[end - 8 : end])
                end = min(len(view), end + -(-max(0, bytes_of_text) // 8) * 8)
            ranges.append((start, end))
        return ranges


def view_of(memory: npt.NDArray[np.uint8]) -> memoryview:
    flat: Any = memory
    return memoryview(flat)


def make_corrupt_error(path: Path, why: str) -> CorruptPartition:
    """Return the error for a partition whose bytes are wrong or missing, for the caller to raise."""
    error = CorruptPartition(
        f"Partition {path} is corrupt: {why}. Import the cache again with --overwrite, or put back a copy "
        f"of the file"
    )
    error.why = why
    return error


def make_unreadable_error(path: Path, why: str) -> UnreadablePartition:
    """Return the error for a partition that the system can't read now, for the caller to raise."""
    error = UnreadablePartition(
        f"Partition {path} can't be read: {why}. Check its disk or mount, then try again"
    )
    error.why = why
    return error
