"""Reads single blocks of a partition whose columns are compressed, and decompresses them as they come."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.spec import Column
from insitu.grid.partitions.block_layout import BlockLayout, make_corrupt_error, view_of
from insitu.grid.partitions.block_reader import DIRECT_ALIGNMENT, WORTH_SKIPPING, BlockReader, scratch_memory
from insitu.grid.partitions.compression import buffers_by_column, decompress, padded
from insitu.grid.partitions.format import file_order, value_type
from insitu.grid.partitions.partition import Partition


class CompressedBlockReader(BlockReader):
    """Chosen columns of the blocks of one compressed partition. May be used by several threads.

    In memory a block has the chosen columns alone, one after another as in a file that isn't compressed.
    Nothing of a block is decompressed before its checksum is found right.
    """

    def __init__(
        self,
        partition: Partition,
        all_columns: tuple[Column, ...],
        columns: Sequence[Column],
        *,
        direct: bool = False,
    ) -> None:
        """As `BlockReader`'s."""
        super().__init__(partition, all_columns, columns, direct=direct)
        if partition.sizes is None or partition.codec is None:
            raise ValueError(f"{partition.path} isn't compressed")
        self._codec_name = partition.codec
        self._sizes = partition.sizes
        held = zip(file_order(all_columns), buffers_by_column(all_columns), strict=True)
        #: The chosen columns, each with the numbers of its buffers, and its number in the order of the file.
        self._layout = [
            (column, numbers, index)
            for index, (column, numbers) in enumerate(held)
            if column.name in self._chosen
        ]
        self._buffers = np.array([number for _, numbers, _ in self._layout for number in numbers])
        counts = [len(numbers) for _, numbers, _ in self._layout]
        #: The place of each chosen column's first buffer among `_buffers`.
        self._firsts = np.cumsum(counts) - counts
        self._memory_sizes = padded(self._sizes[:, self._buffers, 1]).sum(axis=1)

    def is_like(self, other: BlockLayout) -> bool:
        """Return whether blocks are at the same places in the other file, and take as much memory."""
        same = isinstance(other, CompressedBlockReader) and np.array_equal(self._sizes, other._sizes)
        return same and super().is_like(other)

    @property
    def direct(self) -> bool:
        """Whether blocks are read into the memory that they are for: no, they are decompressed into it."""
        return False

    def offset(self, block: int) -> int:
        """Return 0: the block's place in the file has nothing to do with its place in memory."""
        return 0

    def size(self, block: int) -> int:
        """Return the bytes of memory that the block takes."""
        return int(self._memory_sizes[block])

    def body_start(self, block: int) -> int:
        """Return the offset of the body in this memory."""
        return 0

    def column_starts(self, block: int) -> dict[str, int]:
        """Return the offset of each chosen column in this memory."""
        sizes = padded(self._sizes[block, self._buffers, 1])
        starts = (np.cumsum(sizes) - sizes)[self._firsts].tolist()
        return {column.name: start for (column, _, _), start in zip(self._layout, starts, strict=True)}

    def read(
        self, block: int, memory: npt.NDArray[np.uint8], start: int = 0, *, owns_pages: bool = False
    ) -> None:
        """Read the chosen columns of a block, verify them, and decompress them into `memory`, from byte
        `start` on. It takes `size(block)` bytes. Raises CorruptPartition.
        """
        stored = self._read_stored(block)
        ends = np.cumsum(padded(self._sizes[block, :, 0])) + int(self._places[block]["metadata_bytes"])
        sums = self._read_mark(block, stored[: int(self._places[block]["metadata_bytes"])])
        codec = pa.Codec(self._codec_name)
        for column, numbers, index in self._layout:
            first = int(ends[numbers[0]] - padded(self._sizes[block, numbers[0], 0]))
            if zlib.crc32(stored[first : int(ends[numbers[-1]])]) != sums[index]:
                raise make_corrupt_error(self.path, f"column {column.name!r} of its block {block} is damaged")
            for number in numbers:
                stored_bytes, raw_bytes = self._sizes[block, number].tolist()
                begin = int(ends[number]) - stored_bytes - -stored_bytes % 8
                out = memory[start : start + raw_bytes]
                try:
                    decompress(codec, stored[begin : begin + stored_bytes], raw_bytes, out)
                except ValueError as error:
                    why = f"column {column.name!r} of its block {block} is damaged: {error}"
                    raise make_corrupt_error(self.path, why) from error
                start += raw_bytes + -raw_bytes % 8

    def _read_stored(self, block: int) -> memoryview:
        """Return the block as it is in the file, in memory of this thread. Only what is needed was read."""
        place = self._places[block]
        offset, metadata_bytes = int(place["offset"]), int(place["metadata_bytes"])
        size = metadata_bytes + int(place["body_bytes"])
        before = offset % DIRECT_ALIGNMENT
        memory = scratch_memory(before + size + DIRECT_ALIGNMENT)
        for first, end in self._stored_ranges(block, metadata_bytes):
            if not self._read_directly(memory, before + first, before + end, offset + first, True):
                self._read(view_of(memory)[before + first : before + end], offset + first, block)
        return view_of(memory)[before : before + size]

    def _stored_ranges(self, block: int, metadata_bytes: int) -> list[tuple[int, int]]:
        """Return what to read of a block: the metadata and the chosen columns."""
        ends = np.cumsum(padded(self._sizes[block, :, 0])) + metadata_bytes
        ranges = [(0, metadata_bytes)]
        for _, numbers, _ in self._layout:
            first = int(ends[numbers[0]] - padded(self._sizes[block, numbers[0], 0]))
            end = int(ends[numbers[-1]])
            if first - ranges[-1][1] < WORTH_SKIPPING:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((first, end))
        return ranges

    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any:
        """Return a column of texts or lists of a block that was read into `memory`, as an Arrow array."""
        column, numbers = next((c, n) for c, n, _ in self._layout if c.name == name)
        start = self.column_starts(block)[name]
        offsets_bytes, data_bytes = self._sizes[block, numbers, 1].tolist()
        offsets = memory[start : start + offsets_bytes]
        data = memory[start + offsets_bytes : start + offsets_bytes + data_bytes]
        ends = offsets.view(np.int64)
        if ends[-1] != data_bytes or ends[0] or (np.diff(ends) < 0).any():
            raise make_corrupt_error(self.path, f"column {name!r} of its block {block} is damaged")
        rows = self._rows_of(block)
        return pa.Array.from_buffers(
            value_type(column), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )


def open_block_reader(
    partition: Partition, all_columns: tuple[Column, ...], columns: Sequence[Column], *, direct: bool = False
) -> BlockReader:
    """Return what reads single blocks of a partition, compressed or not. See `BlockReader`."""
    kind = BlockReader if partition.codec is None else CompressedBlockReader
    return kind(partition, all_columns, columns, direct=direct)
