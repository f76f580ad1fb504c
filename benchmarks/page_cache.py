"""Puts files out of the page cache, and tells how much of them is in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def evict(paths: Iterable[Path]) -> float:
    """Put files out of the page cache; return the share of them that is still there.

    The system's whole cache is dropped, too, where this process may do that.
    """
    files = list(paths)
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
    return resident_share(files)


def resident_share(paths: Iterable[Path]) -> float:
    """Return the share of the pages of some files that is in the page cache."""
    pages = resident = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file:
            address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        _LIBC.mincore(address, size, found.ctypes.data)
        _LIBC.munmap(address, size)
        pages += len(found)
        resident += int((found & 1).sum())
    return resident / max(1, pages)
