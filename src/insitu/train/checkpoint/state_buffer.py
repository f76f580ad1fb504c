"""A training's state in one piece of memory, laid out as in a checkpoint's file.

Arrays lie one after the other, each from a multiple of 64 bytes on, with zeros between. The memory begins
and ends at a page, so that the disk can take it as it is, past the system's cache: a processor that trains
has no time to copy it once more.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from insitu.exchange.pages import ALIGNMENT, Pages, aligned_empty
from insitu.train.collectives import Parcel, dtype_of

_SLICE_BYTES = 1 << 20
"""What is copied before it is summed: it must still be in the processor's cache."""


def offsets(kinds: Sequence[Sequence[Any]]) -> tuple[list[int], int]:
    """(where each array begins, bytes of all), for arrays of these [name of the dtype, shape]."""
    begins, end = [], 0
    for name, shape in kinds:
        begins.append(end)
        size = math.prod(shape) * dtype_of(name).itemsize
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return begins, end


class Image:
    """Memory that holds a copy of arrays, and the checksum of its bytes (XXH3, 64 bits, as hex digits)."""

    def __init__(self) -> None:
        self._room = Pages(mmap.PAGESIZE).array()
        self.nbytes = 0
        self.checksum = ""

    @property
    def pages(self) -> memoryview:
        """Whole pages that hold the `nbytes` of the arrays, and maybe more behind them."""
        return self._room[: _to_pages(self.nbytes)].data

    def take(self, parcel: Parcel) -> None:
        """Copies the arrays of `parcel` in place of those before, in the same memory where it suffices: new
        memory costs more than to copy to it."""
        begins, self.nbytes = offsets(parcel.kinds)
        if self.nbytes > self._room.size:
            self._room = Pages(_to_pages(self.nbytes)).array()
        room = self._room
        summed = xxhash.xxh3_64()
        for begin, end, array in zip(begins, [*begins[1:], self.nbytes], parcel.arrays, strict=True):
            taken = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for start in range(0, taken.size, _SLICE_BYTES):
                piece = taken[start : start + _SLICE_BYTES]
                place = room[begin + start : begin + start + piece.size]
                np.copyto(place, piece)
                summed.update(place.data)
            gap = room[begin + taken.size : end]
            gap[:] = 0
            summed.update(gap.data)
        self.checksum = summed.hexdigest()


def read_image(file: BinaryIO, kinds: Sequence[Sequence[Any]]) -> tuple[list[NDArray[Any]], str]:
    """(the arrays, checksum of their bytes) out of an open file. Raises ValueError where it has more or fewer
    bytes."""
    begins, size = offsets(kinds)
    room = aligned_empty((size,), np.dtype(np.uint8))
    summed = xxhash.xxh3_64()
    for start in range(0, size, _SLICE_BYTES):
        place = room[start : start + _SLICE_BYTES]
        part = file.read(place.size)
        if len(part) < place.size:
            raise ValueError("arrays.bin ends too early")
        place[:] = np.frombuffer(part, np.uint8)
        summed.update(part)
    if file.read(1):
        raise ValueError("arrays.bin is longer than it should be")
    arrays = []
    for begin, (name, shape) in zip(begins, kinds, strict=True):
        dtype = dtype_of(name)
        length = math.prod(shape) * dtype.itemsize
        arrays.append(room[begin : begin + length].view(dtype).reshape(shape))
    return arrays, summed.hexdigest()


def _to_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
