"""Memory of a process's own: aligned, or whose pages can change places.

A result that came over a network is put together beside the caller's buffer, so that a loss half way leaves
the buffer as it was. At the end the two exchange their pages: the kernel rewrites some page-table entries,
60 microseconds for 100 MB, where copying takes 20 milliseconds.
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

from insitu.errors import ExchangeError
from insitu.exchange.arithmetic import PAGE
from insitu.exchange.memory import HUGE

ALIGNMENT = 64
"""Bytes; what processors like best, TensorFlow asks of memory that it is to take as it is, and PyTorch's own
memory begins at multiples of."""
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
    """`size` zero bytes at an address that is a multiple of 2 MiB. Arrays made by `array` keep them.

    Unless `huge`, the system gives them in small pages, when they are first touched: less of them where a few
    bytes here and there are needed.
    """

    def __init__(self, size: int, *, huge: bool = True) -> None:
        self.size = size
        self._room = max(PAGE, -(-size // PAGE) * PAGE)
        self._start = _libc.mmap(
            None,
            self._room + HUGE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            _PRIVATE_ANONYMOUS | _NO_RESERVE,
            -1,
            0,
        )
        if self._start == _FAILED:
            self._start = None
            raise ExchangeError(f"{size} bytes of memory can't be had: {os.strerror(ctypes.get_errno())}")
        self.address = -(-self._start // HUGE) * HUGE
        if huge:
            _libc.madvise(self.address, self._room, _MADV_HUGEPAGE)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.address, False), "shape": (self.size,), "typestr": "|u1"}

    def array(self) -> np.ndarray:
        """All bytes, as uint8[size]."""
        return np.asarray(self)

    def holds(self, array: np.ndarray) -> bool:
        start = array.__array_interface__["data"][0]
        return bool(self.address <= start and start + array.nbytes <= self.address + self.size)

    def __del__(self) -> None:
        if self._start:
            _libc.munmap(self._start, self._room + HUGE)


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array without values whose memory begins at a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


class PageSwapper:
    """Swaps the contents of `array` (uint8, in some Pages) with the beginning of `staging`."""

    def __init__(self) -> None:
        self._between: Pages | None = None

    def put(self, staging: Pages, array: np.ndarray, swappable: bool) -> None:
        """Makes the contents of `array` those of the beginning of `staging`, whose own are lost. With
        `swappable`, `array` lies in Pages, and whole pages are exchanged where it starts on one."""
        address = array.__array_interface__["data"][0]
        whole = array.nbytes // PAGE * PAGE if swappable and address % PAGE == 0 else 0
        if whole < _SWAP_FROM or not self._swap(staging.address, address, whole):
            whole = 0
        np.copyto(array[whole:], staging.array()[whole : array.nbytes])

    def _swap(self, one: int, other: int, size: int) -> bool:
        if self._between is None or self._between.size < size:
            self._between = Pages(size)
        between = self._between.address
        if not _move(other, between, size):
            return False
        if not _move(one, other, size):
            if not _move(between, other, size):
                raise ExchangeError(f"Memory can't be moved back: {os.strerror(ctypes.get_errno())}")
            return False
        _move(between, one, size)
        return True


_SWAP_FROM = 256 * 1024
"""Bytes below which copying is faster."""


def _move(source: int, target: int, size: int) -> bool:
    """Moves pages. Both ranges stay mapped, so that nothing else can slip in between."""
    return bool(_libc.mremap(source, size, size, _MAY_MOVE_TO_KEEPING_BOTH, target) == target)
