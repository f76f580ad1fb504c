"""Private memory of a process: aligned arrays, and memory whose pages can be swapped.

A result that arrives over a network is computed in other memory than the caller's buffer, so that a loss
leaves the buffer as it was. At the end the two swap their pages: the kernel rewrites some page-table entries,
in 60 microseconds for 100 MB; copying takes 20 milliseconds.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import ExchangeError
from insitu.exchange.memory import HUGE

PAGE = mmap.PAGESIZE
"""Bytes of a page of this machine. Only whole ones are swapped: memory behind an array stays as it is."""
ALIGNMENT = 64
"""Bytes. TensorFlow takes memory without copying it only if it is aligned like this; PyTorch aligns its own
so."""
_PRIVATE_ANONYMOUS = 0x22
_NO_RESERVE = 0x4000
_MAY_MOVE_TO_KEEPING_BOTH = 1 | 2 | 4
_MADV_HUGEPAGE = 14
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


class Pages:
    """`size` zero bytes at an address that is a multiple of 2 MiB. Arrays made by `array` keep them."""

    def __init__(self, size: int, *, huge: bool = True) -> None:
        """`huge` False: the system allocates small pages when they are first touched. This saves memory if
        only some of them are."""
        #: Bytes.
        self.size = size
        self._rounded = max(PAGE, -(-size // PAGE) * PAGE)
        self._start = _libc.mmap(
            None,
            self._rounded + HUGE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            _PRIVATE_ANONYMOUS | _NO_RESERVE,
            -1,
            0,
        )
        if self._start == _FAILED:
            self._start = None
            raise ExchangeError(
                f"{size} bytes of memory must be available. Received: {os.strerror(ctypes.get_errno())}. "
                "Free memory, or use smaller buffers"
            )
        #: The address of the first byte.
        self.address = -(-self._start // HUGE) * HUGE
        if huge:
            _libc.madvise(self.address, self._rounded, _MADV_HUGEPAGE)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.address, False), "shape": (self.size,), "typestr": "|u1"}

    def array(self) -> np.ndarray:
        """Return all bytes, as uint8[size]."""
        return np.asarray(self)

    def holds(self, array: np.ndarray) -> bool:
        """Return True if `array` is in these pages."""
        start = array.__array_interface__["data"][0]
        return bool(self.address <= start and start + array.nbytes <= self.address + self.size)

    def __del__(self) -> None:
        if self._start:
            _libc.munmap(self._start, self._rounded + HUGE)


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialized array whose memory begins at a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    data = np.empty(size + ALIGNMENT, np.uint8)
    begin = -data.ctypes.data % ALIGNMENT
    return data[begin : begin + size].view(dtype).reshape(shape)


class PageSwapper:
    """Moves contents from one piece of memory to another by swapping pages, if that is possible."""

    def __init__(self) -> None:
        self._spare: Pages | None = None

    def move(self, staging: Pages, array: np.ndarray, swappable: bool) -> None:
        """Move the beginning of `staging` to `array` (uint8). The contents of `staging` are undefined
        afterwards.

        `swappable`: `array` is in Pages; its whole pages are swapped if it starts on one.
        """
        address = array.__array_interface__["data"][0]
        whole = array.nbytes // PAGE * PAGE if swappable and address % PAGE == 0 else 0
        if whole < _MIN_SWAP_BYTES or not self._swap(staging.address, address, whole):
            whole = 0
        np.copyto(array[whole:], staging.array()[whole : array.nbytes])

    def _swap(self, one: int, other: int, size: int) -> bool:
        if self._spare is None or self._spare.size < size:
            self._spare = Pages(size)
        spare = self._spare.address
        if not _move(other, spare, size):
            return False
        if not _move(one, other, size):
            if not _move(spare, other, size):
                raise ExchangeError(
                    f"Swapped pages must be movable. Received: {os.strerror(ctypes.get_errno())}. "
                    "Restart this task: the contents of the buffer are undefined"
                )
            return False
        _move(spare, one, size)
        return True


_MIN_SWAP_BYTES = 256 * 1024
"""Bytes below which copying is faster."""


def _move(source: int, target: int, size: int) -> bool:
    """Move pages; return True if it worked. Both ranges stay mapped, so that nothing else is mapped there."""
    return bool(_libc.mremap(source, size, size, _MAY_MOVE_TO_KEEPING_BOTH, target) == target)
