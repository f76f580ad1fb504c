"""Writes files past the system's cache, and reads them back from the disk.

The way through the cache costs the processor a copy, and memory that the system has to find for each page.
Bytes that are read back from the cache say nothing of the disk.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from insitu.base.disk.durable import PageFile, set_direct_io

ROOM_BYTES = 2 << 20
"""Bytes that are written or read at once."""
_READ_BACK_BYTES = 16 << 20
"""Bytes that are written before they are read back: then the disk is asked seldom."""
_PAGE = mmap.PAGESIZE


def make_room() -> memoryview:
    """Return memory that the files of one thread share."""
    return memoryview(mmap.mmap(-1, ROOM_BYTES))


class DirectFile:
    """A file that grows by pieces. No file is open between calls.

    If the file system can't go past its cache, it is written and read through it. All methods raise OSError.
    """

    def __init__(self, path: Path, room: memoryview, size: int = 0) -> None:
        """Continue behind the first `size` bytes of the file at `path`; with 0, replace it. `room` is used
        during calls only."""
        self._path, self._room = path, room
        #: Bytes in the file, whole pages.
        self._written = size - size % _PAGE
        #: The bytes after them.
        self._tail = b""
        if size % _PAGE:
            with path.open("rb", buffering=0) as file:
                self._tail = os.pread(file.fileno(), size % _PAGE, self._written)
        #: Bytes that were read back, and their CRC-32.
        self._read = self._crc32 = 0

    def append(self, pieces: Iterable[memoryview]) -> None:
        """Write pieces, but for what fills no page yet. Now and then read back what was written."""
        room, filled = self._room, len(self._tail)
        room[:filled] = self._tail
        values = np.frombuffer(room, np.uint8)
        with contextlib.closing(PageFile(self._path, ROOM_BYTES, self._written)) as file:
            for piece in pieces:
                while len(piece):
                    taken = piece[: len(room) - filled]
                    # NumPy lets other threads run meanwhile.
                    np.copyto(values[filled : filled + len(taken)], np.frombuffer(taken, np.uint8))
                    piece, filled = piece[len(taken) :], filled + len(taken)
                    if filled == len(room):
                        file.write(room)
                        self._written, filled = self._written + filled, 0
            whole = filled - filled % _PAGE
            file.write(room[:whole])
        self._written += whole
        self._tail = bytes(room[whole:filled])
        if self._written - self._read >= _READ_BACK_BYTES:
            self._read_back(self._written)

    def finish(self) -> int:
        """Write what is left. Returns the CRC-32 of the whole file, as the disk has it.

        Its size and place survive a power cut only after an fsync.
        """
        size, room = self._written + len(self._tail), self._room
        with contextlib.closing(PageFile(self._path, ROOM_BYTES, self._written)) as file:
            if self._tail:
                room[: len(self._tail)] = self._tail
                room[len(self._tail) : _PAGE] = bytes(_PAGE - len(self._tail))
                file.write(room[:_PAGE])
            file.cut(size)
        self._read_back(size)
        return self._crc32

    def _read_back(self, end: int) -> None:
        """Take the checksum of what is in the file up to `end`, which is its size or begins a page."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            set_direct_io(descriptor, True)
            while self._read < end:
                wanted = min(len(self._room), -(-(end - self._read) // _PAGE) * _PAGE)
                try:
                    size = os.preadv(descriptor, [self._room[:wanted]], self._read)
                except OSError as error:
                    # Some file systems say only now that they can't.
                    if error.errno != errno.EINVAL or not set_direct_io(descriptor, False):
                        raise
                    continue
                if not size:
                    raise OSError(f"{self._path} has become shorter than what was written to it")
                self._crc32 = zlib.crc32(self._room[:size], self._crc32)
                self._read += size
        finally:
            os.close(descriptor)
