"""Reads single blocks of a partition from the disk, without mapping it, and verifies them as they come."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.grid.partitions.format import (
    column_offsets,
    file_order,
    find_mark,
    is_variable,
    row_bytes,
    value_type,
)
from insitu.grid.partitions.partition import Partition, make_corrupt_error
from insitu.spec import Column

WORTH_SKIPPING = 64 << 10
"""Bytes between two columns from which on two reads cost less than one."""
_MOST_OPEN = 256
"""Files that stay open in a process. A shard may have thousands; many systems allow 1,024 at a time."""
DIRECT_ALIGNMENT = 4096
"""Direct reads begin and end at multiples of so many bytes, in the file and in memory."""


class BlockReader:
    """Chosen columns of the blocks of one partition, read by `pread`. May be used by several threads.

    Direct reads go past the page cache, straight into the memory that they are for. They spare the system a
    copy, and the cache what won't be read again before it is thrown out.
    """

    def __init__(
        self,
        partition: Partition,
        all_columns: tuple[Column, ...],
        columns: Sequence[Column],
        *,
        direct: bool = False,
    ) -> None:
        """`columns` are chosen out of `all_columns`. `direct`: read past the page cache, if the system can.

        Raises OSError.
        """
        self.path: Path = partition.path
        self._places = partition.places
        self._rows = partition.rows
        self._block_rows = partition.block_rows
        self._all = all_columns
        self._chosen = [column.name for column in columns]
        self._has_text = any(map(is_variable, columns))
        self._file = _File(self.path, os.O_RDONLY)
        #: None where reads aren't direct. Set to None by the first one that the file system refuses.
        self._direct: _File | None = None
        if direct:
            with contextlib.suppress(OSError):
                self._direct = _File(self.path, os.O_RDONLY | os.O_DIRECT)

    @property
    def direct(self) -> bool:
        """Whether blocks are read past the page cache."""
        return self._direct is not None

    def offset(self, block: int) -> int:
        """Return the byte of the file at which the block begins."""
        return int(self._places[block]["offset"])

    def size(self, block: int) -> int:
        """Return the bytes of memory that the block takes."""
        place = self._places[block]
        return int(place["metadata_bytes"]) + int(place["body_bytes"])

    def body_start(self, block: int) -> int:
        """Return where in this memory the body begins."""
        return int(self._places[block]["metadata_bytes"])

    def column_starts(self, block: int) -> dict[str, int]:
        """Return where in this memory each column of fixed size begins."""
        offsets = column_offsets(self._all, self._rows_of(block))
        return {name: self.body_start(block) + offset for name, offset in offsets.items()}

    def _rows_of(self, block: int) -> int:
        return min(self._block_rows, self._rows - block * self._block_rows)

    def read(self, block: int, memory: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Read the chosen columns of a block into `memory`, from byte `start` on, and verify them.

        It takes `size(block)` bytes. What lies between columns may be read, too. Where reads are direct, the
        bytes around it may be overwritten up to the next multiples of DIRECT_ALIGNMENT. Raises
        CorruptPartition.
        """
        offset, view = self.offset(block), view_of(memory)
        for first, end in self._ranges(block):
            if not self._read_directly(memory, start + first, start + end, offset + first):
                self._read(view[start + first : start + end], offset + first, block)
        view = view[start : start + self.size(block)]
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

    def _read_directly(self, memory: npt.NDArray[np.uint8], start: int, end: int, offset: int) -> bool:
        """Read bytes of the file into [start, end) of memory; return whether that was possible.

        Where memory isn't aligned like the file they are copied once. Whatever goes wrong is left to a read
        through the page cache, whose error says what it was.
        """
        file, size = self._direct, end - start
        if file is None:
            return False
        before = offset % DIRECT_ALIGNMENT
        after = -(before + size) % DIRECT_ALIGNMENT
        in_place = start >= before and end + after <= len(memory)
        in_place = in_place and (memory.ctypes.data + start - before) % DIRECT_ALIGNMENT == 0
        target = memory[start - before : end + after] if in_place else scratch_memory(before + size + after)
        view, done = view_of(target), 0
        try:
            while done < before + size:
                came = file.read(view[done:], offset - before + done)
                done += came
                if done < before + size and (not came or came % DIRECT_ALIGNMENT):
                    return False
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._direct = None
            return False
        if not in_place:
            memory[start:end] = target[before : before + size]
        return True

    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any:
        """Return a column of texts or lists of a block that was read into `memory`, as an Arrow array.

        Only what `read` has verified is used: the metadata, which has no checksum, might point anywhere.
        """
        ranges = self._column_ranges(block, view_of(memory))
        names = [column.name for column in file_order(self._all)]
        start, stop = ranges[names.index(name)]
        offsets_end = start + 8 * (self._rows_of(block) + 1)
        offsets, data = memory[start:offsets_end], memory[offsets_end:stop]
        kind = next(value_type(column) for column in self._all if column.name == name)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, self._rows_of(block), buffers)

    def _ranges(self, block: int) -> list[tuple[int, int]]:
        """Return what to read: all of the block with texts, else the metadata and the chosen columns."""
        if self._has_text:
            return [(0, self.size(block))]
        starts, rows = self.column_starts(block), self._rows_of(block)
        ranges = [(0, self.body_start(block))]
        for column in file_order(self._all):
            if column.name in self._chosen:
                start = starts[column.name]
                stop = start + -(-rows * row_bytes(column) // 8) * 8
                if start - ranges[-1][1] < WORTH_SKIPPING:
                    ranges[-1] = (ranges[-1][0], stop)
                else:
                    ranges.append((start, stop))
        return ranges

    def _column_ranges(self, block: int, view: memoryview) -> list[tuple[int, int]]:
        """Return where each column lies, in the order of the file; of text, as a damaged block may say."""
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

    def _read(self, memory: memoryview, offset: int, block: int) -> None:
        while memory:
            try:
                size = self._file.read(memory, offset)
            except OSError as error:
                why = f"its block {block} can't be read ({error.strerror})"
                raise make_corrupt_error(self.path, why) from error
            if not size:
                raise make_corrupt_error(self.path, f"it ends within its block {block}")
            memory, offset = memory[size:], offset + size


class _File:
    """A file that is read from. The first ones of a process stay open, others are opened for each read."""

    _open = 0
    """Files that stay open."""

    def __init__(self, path: Path, flags: int) -> None:
        """Raises OSError where the file can't be opened."""
        self._path = path
        self._flags = flags | os.O_CLOEXEC
        descriptor = os.open(path, self._flags)
        #: -1 where it doesn't stay open.
        self._descriptor = -1
        if _File._open >= _MOST_OPEN:
            os.close(descriptor)
            return
        self._descriptor = descriptor
        _File._open += 1
        ending: Any = weakref.finalize(self, _close, descriptor)
        ending.atexit = False  # other threads may still read

    def read(self, memory: memoryview, offset: int) -> int:
        """Read into `memory` from byte `offset` on; return the bytes that came. Raises OSError."""
        if self._descriptor >= 0:
            return os.preadv(self._descriptor, [memory], offset)
        descriptor = os.open(self._path, self._flags)
        try:
            return os.preadv(descriptor, [memory], offset)
        finally:
            os.close(descriptor)


_OF_THREAD = threading.local()


def scratch_memory(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` bytes of memory of this thread that begin at a page."""
    pages = getattr(_OF_THREAD, "pages", None)
    if pages is None or len(pages) < size:
        pages = _OF_THREAD.pages = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    found: npt.NDArray[np.uint8] = pages[:size]
    return found


def _close(descriptor: int) -> None:
    _File._open -= 1
    os.close(descriptor)


def view_of(memory: npt.NDArray[np.uint8]) -> memoryview:
    flat: Any = memory
    return memoryview(flat)
