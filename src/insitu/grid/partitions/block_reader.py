"""Reads single blocks of a partition from the disk, without mapping it, and verifies them as they come."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.spec import Column
from insitu.grid.partitions.block_layout import (
    BlockLayout,
    make_corrupt_error,
    make_unreadable_error,
    view_of,
)
from insitu.grid.partitions.format import file_order, row_bytes
from insitu.grid.partitions.partition import Partition

WORTH_SKIPPING = 64 << 10
"""Bytes between two columns from which on two reads cost less than one."""
_MOST_OPEN = 256
"""Files that stay open in a process. A shard may have thousands; many systems allow 1,024 at a time."""
DIRECT_ALIGNMENT = 4096
"""Direct reads begin and end at multiples of so many bytes, in the file and in memory."""


class BlockReader(BlockLayout):
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

        Raises UnreadablePartition.
        """
        place = (partition.path, partition.places, partition.rows, partition.block_rows)
        super().__init__(*place, all_columns, columns)
        try:
            self._file = _File(self.path, os.O_RDONLY)
        except OSError as error:
            raise make_unreadable_error(self.path, str(error.strerror or error)) from error
        #: None if reads aren't direct. Set to None by the first one that the file system refuses.
        self._direct: _File | None = None
        if direct:
            with contextlib.suppress(OSError):
                self._direct = _File(self.path, os.O_RDONLY | os.O_DIRECT)

    @property
    def direct(self) -> bool:
        """Whether blocks are read past the page cache."""
        return self._direct is not None

    def read(
        self, block: int, memory: npt.NDArray[np.uint8], start: int = 0, *, owns_pages: bool = False
    ) -> None:
        """Read the chosen columns of a block into `memory`, from byte `start` on, and verify them.

        It takes `size(block)` bytes. Bytes between columns may be read, too. With `owns_pages` the bytes
        around it, up to the next multiples of DIRECT_ALIGNMENT, may be overwritten: direct reads need no copy
        then. Raises CorruptPartition.
        """
        offset, view = self.offset(block), view_of(memory)
        for first, end in self._ranges(block):
            if not self._read_directly(memory, start + first, start + end, offset + first, owns_pages):
                self._read(view[start + first : start + end], offset + first, block)
        self.check(block, view[start : start + self.size(block)])

    def _read_directly(
        self, memory: npt.NDArray[np.uint8], start: int, end: int, offset: int, owns_pages: bool
    ) -> bool:
        """Read bytes of the file into [start, end) of memory; return whether that was possible.

        If memory isn't aligned like the file, or others own the bytes around, they are copied once. Whatever
        goes wrong is left to a read through the page cache, whose error says what it was.
        """
        file, size = self._direct, end - start
        if file is None:
            return False
        before = offset % DIRECT_ALIGNMENT
        after = -(before + size) % DIRECT_ALIGNMENT
        in_place = owns_pages and start >= before and end + after <= len(memory)
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

    def _read(self, memory: memoryview, offset: int, block: int) -> None:
        while memory:
            try:
                size = self._file.read(memory, offset)
            except OSError as error:
                why = f"its block {block} can't be read ({error.strerror})"
                raise make_unreadable_error(self.path, why) from error
            if not size:
                raise make_corrupt_error(self.path, f"it ends within its block {block}")
            memory, offset = memory[size:], offset + size


class _File:
    """A file that is read from. The first ones of a process stay open, others are opened for each read."""

    _open = 0
    """Files that stay open."""

    def __init__(self, path: Path, flags: int) -> None:
        """Raises OSError if the file can't be opened."""
        self._path = path
        self._flags = flags | os.O_CLOEXEC
        descriptor = os.open(path, self._flags)
        #: -1 if it doesn't stay open.
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
