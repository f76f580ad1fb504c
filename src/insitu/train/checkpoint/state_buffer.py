"""One piece of memory for a training's state, laid out as in a checkpoint's file.

Arrays follow each other. Each begins at a multiple of 64 bytes, with zeros between. The memory begins and
ends at a page, so that it can be written past the system's cache, without one more copy.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from insitu.base.serialization import Payload, parse_dtype
from insitu.exchange import ALIGNMENT, Pages, aligned_empty

_SLICE_BYTES = 1 << 20
"""Bytes that are read at a time, and summed while they are in the processor's cache."""


def compute_offsets(specs: Sequence[Sequence[Any]]) -> tuple[list[int], int]:
    """Return (offset of each array, bytes of all) for arrays of these [name of the dtype, shape]."""
    begins, end = [], 0
    for name, shape in specs:
        begins.append(end)
        size = math.prod(shape) * parse_dtype(name).itemsize
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return begins, end


class StateBuffer:
    """Memory that holds a copy of arrays."""

    def __init__(self) -> None:
        self._memory = Pages(mmap.PAGESIZE).array()
        self.nbytes = 0
        """Bytes of the arrays, with the gaps between them."""

    @property
    def pages(self) -> memoryview:
        """Whole pages, which begin with the `nbytes` of the arrays."""
        return self._memory[: _to_pages(self.nbytes)].data

    def copy_from(self, payload: Payload) -> None:
        """Copy the arrays of `payload` in place of the previous ones. The same memory is used if it suffices:
        new memory costs more than the copy."""
        begins, self.nbytes = compute_offsets(payload.specs)
        if self.nbytes > self._memory.size:
            self._memory = Pages(_to_pages(self.nbytes)).array()
        room = self._memory
        for begin, end, array in zip(begins, [*begins[1:], self.nbytes], payload.arrays, strict=True):
            taken = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            np.copyto(room[begin : begin + taken.size], taken)
            room[begin + taken.size : end] = 0

    def compute_digest(self) -> str:
        """Return the SHA-256 of the arrays' bytes, as hex digits. It takes longer than the copy: leave it to
        the thread that writes."""
        return hashlib.sha256(self.pages[: self.nbytes]).hexdigest()


def read_arrays(file: BinaryIO, specs: Sequence[Sequence[Any]]) -> tuple[list[NDArray[Any]], str]:
    """Return (the arrays, SHA-256 of their bytes) of an open file. Raises ValueError for a file of another
    length, before anything is allocated."""
    begins, size = compute_offsets(specs)
    held = file.seek(0, os.SEEK_END)
    if held != size:
        raise ValueError(f"arrays.bin must have {size} bytes. Received: {held}")
    file.seek(0)
    room = aligned_empty((size,), np.dtype(np.uint8))
    summed = hashlib.sha256()
    for start in range(0, size, _SLICE_BYTES):
        target = room[start : start + _SLICE_BYTES]
        part = file.read(target.size)
        if len(part) < target.size:
            raise ValueError(f"arrays.bin must have {size} bytes. Received: {start + len(part)}")
        target[:] = np.frombuffer(part, np.uint8)
        summed.update(part)
    arrays = []
    for begin, (name, shape) in zip(begins, specs, strict=True):
        dtype = parse_dtype(name)
        length = math.prod(shape) * dtype.itemsize
        arrays.append(room[begin : begin + length].view(dtype).reshape(shape))
    return arrays, summed.hexdigest()


def _to_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
