"""Many files, mapped into one range of addresses, so that one call of NumPy takes rows of all of them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import GridError

_LIMITS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""The system's errors for a process that has too many files or mappings, or a system that has."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ = 22
"""Linux's number; Python's mmap has no name for it yet."""


class AddressSpace:
    """Files that are mapped for reading, each a multiple of `alignment` bytes after the first one.

    `memory` spans all of them; between them are addresses without memory, which nobody may read. File i
    begins at byte `offsets[i]`. The mapping ends with the last view of `memory`.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], alignment: int) -> None:
        """Map the first `sizes[i]` bytes of `paths[i]`. Raises OSError, and GridError if this process may map
        no more."""
        unit = math.lcm(mmap.PAGESIZE, alignment)
        room = [-(-size // unit) * unit for size in sizes]
        self.offsets = np.concatenate(([0], np.cumsum(room[:-1], dtype=np.int64))).astype(np.int64)
        self._sizes = list(sizes)
        length = max(unit, sum(room))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        with _limits_explained(len(paths)):
            self._address = _map(None, length, _PROT_NONE, flags, -1)
        buffer = (ctypes.c_ubyte * length).from_address(self._address)
        # Arrays over it keep `buffer`; when the last one is gone, so is the mapping.
        ending: Any = weakref.finalize(buffer, _LIBC.munmap, self._address, length)
        ending.atexit = False  # other threads may still read
        self.memory: npt.NDArray[np.uint8] = np.ctypeslib.as_array(buffer)
        self.memory.flags.writeable = False
        for path, size, offset in zip(paths, sizes, self.offsets.tolist(), strict=True):
            with _limits_explained(len(paths)), path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < size:
                    raise OSError(f"{path} has less than {size} bytes")
                flags = mmap.MAP_SHARED | _MAP_FIXED
                _map(self._address + offset, size, mmap.PROT_READ, flags, file.fileno())

    def prefault(self, most: int | None = None, pieces: Sequence[tuple[int, int]] | None = None) -> None:
        """Map all pages at once, large ones if the kernel has them: some 20 GB/s of cached file.

        `pieces` are (first byte, bytes) of memory that is used; None: all of it. Bytes that are not in the
        page cache are read.

        Taken one by one on first use they make the first epoch several times slower. Left out if `most`, the
        bytes of all files that are read together, would fill half of the memory, or the kernel is older than
        5.14. By default these are the files mapped here.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if (sum(self._sizes) if most is None else most) >= memory // 2:
            return
        for size, offset in zip(self._sizes, self.offsets.tolist(), strict=True):
            # A kernel that refuses an advice maps pages as they are used.
            _LIBC.madvise(self._address + offset, size, mmap.MADV_HUGEPAGE)
            if pieces is None:
                _LIBC.madvise(self._address + offset, size, _MADV_POPULATE_READ)
        for start, size in pieces or ():
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            _LIBC.madvise(self._address + page, start - page + size, _MADV_POPULATE_READ)

    def fault_in(self, start: int, size: int) -> None:
        """Have bytes of memory read from their file. Raises OSError if the disk fails or the file is cut
        short, which would end the process that uses them. Kernels before 5.14 don't say."""
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if _LIBC.madvise(self._address + page, start - page + size, _MADV_POPULATE_READ):
            number = ctypes.get_errno()
            if number == errno.EFAULT:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def _limits_explained(files: int) -> Iterator[None]:
    """Raise GridError if a process has reached what the system allows."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        raise GridError(
            f"A process must be allowed to map all partitions that it reads. Received: {error}, for {files} "
            f"of them beside those that are mapped already. Allow it more (`ulimit -n 65536`, `sysctl -w "
            f"vm.max_map_count=262144`), or import the cache again with fewer --partitions"
        ) from error


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: Any = _LIBC.mmap(address, max(1, size), protection, flags, descriptor, 0)
    if mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{size} bytes can't be mapped: {os.strerror(number)}")
    return int(mapped)
