"""Keeps what is written from filling the system's cache: the disk begins at once, and isn't far behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from pathlib import Path

_BEHIND_BYTES = 64 << 20
"""Bytes that the disk may be behind. It has enough to do, and the cache keeps room for others."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]


class WritePacing:
    """Paces the writes of one thread to any number of files.

    Left alone, the system collects gigabytes, then makes all writers of the machine wait for the disk.
    """

    def __init__(self, *, drop: bool) -> None:
        """With `drop`, what is on the disk leaves the system's cache, for data that doesn't fit there."""
        self._drop = drop
        self._behind: deque[tuple[Path, int, int]] = deque()
        self._bytes = 0

    def add(self, path: Path, descriptor: int, offset: int, size: int) -> None:
        """Have the disk begin to write [offset, offset + size) of a file, and wait for what is far behind."""
        _LIBC.sync_file_range(descriptor, offset, size, _WRITE)
        self._behind.append((path, offset, size))
        self._bytes += size
        while self._bytes > _BEHIND_BYTES:
            path, offset, size = self._behind.popleft()
            self._bytes -= size
            self._wait(path, offset, size)

    def _wait(self, path: Path, offset: int, size: int) -> None:
        # A file that is gone, or a file system that knows none of this, needs no pacing. fsync
        # reports errors of the disk at the end.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _LIBC.sync_file_range(descriptor, offset, size, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
                if self._drop:
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
