"""Allocates shared memory for the arrays of single requests: keys, and rows of tables in both directions.

Servers of the same host read and write these arrays where they lie, so nothing is sent over the socket.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.exchange import GRANT_BYTES, Lender, memory
from insitu.parameters.rules import Array, BufferRef

ARENA_BYTES = 32 << 20
"""Where the arena has no room for a request, its arrays are sent over the socket."""
_CACHE_LINE = 64
Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array."""


class Arena:
    """One segment of shared memory, allocated first-fit.

    Only one thread may allocate and free. Arrays that were detached may be dropped in any thread.
    """

    SEGMENT = 2
    """Number of the segment on each connection; see `WorkerBuffers.SEGMENT` for the other one."""

    #: Bytes of the segment.
    size: int
    #: File descriptor of the segment, which servers are handed; -1 once closed.
    descriptor: int

    def __init__(self, size: int = ARENA_BYTES) -> None:
        self.size = size
        self.descriptor = memory.create("insitu-rows", size + GRANT_BYTES)
        segment = memory.Segment(os.dup(self.descriptor), size + GRANT_BYTES)
        #: Grants servers the right to write, and takes it back.
        self.lender = Lender(segment, size)
        self._memory = segment.array()
        #: (start, stop) in bytes of each free block, ascending.
        self._free: list[tuple[int, int]] = [(0, size)]
        #: (start, size) of blocks whose detached array has been dropped, by whichever thread dropped it.
        self._dropped: deque[tuple[int, int]] = deque()

    def allocate(self, specs: Sequence[Spec]) -> Allocation | None:
        """Allocate arrays of these shapes and dtypes in one block; None where no block is large enough."""
        self._free_dropped()
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in specs]
        needed = sum(_round_up(size) for size in sizes)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= needed:
                self._free[index : index + 1] = [(start + needed, stop)] if stop - start > needed else []
                return Allocation(self, start, needed, self._make_arrays(start, sizes, specs))
        return None

    def _make_arrays(
        self, start: int, sizes: Sequence[int], specs: Sequence[Spec]
    ) -> list[tuple[Array, BufferRef]]:
        made = []
        for size, (shape, dtype) in zip(sizes, specs, strict=True):
            array = self._memory[start : start + size].view(dtype).reshape(shape)
            made.append((array, BufferRef(self.SEGMENT, start)))
            start += _round_up(size)
        return made

    def free(self, start: int, size: int) -> None:
        """Make a block available again, and merge it with free neighbours."""
        if not size:
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (start, start + size)]):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged

    def _free_dropped(self) -> None:
        while self._dropped:
            self.free(*self._dropped.popleft())

    def detach(self, array: Array, start: int, size: int) -> Array:
        """Return `array` as one that frees its block when its last view is dropped."""
        return np.asarray(_BlockOwner(array, self._dropped, start, size))

    @property
    def shared_size(self) -> int:
        """Bytes of the segment with the grants."""
        return self.size + GRANT_BYTES

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated now."""
        self._free_dropped()
        return self.size - sum(stop - start for start, stop in self._free)

    def close(self) -> None:
        """Close the file descriptor. Arrays stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Allocation:
    """Arrays of one block of the arena, until `free`."""

    #: The arrays, as they were asked for.
    arrays: list[Array]
    #: Their positions in shared memory, in the same order, for the message that names them.
    refs: list[BufferRef]

    def __init__(self, arena: Arena, start: int, size: int, made: list[tuple[Array, BufferRef]]) -> None:
        self.arrays = [array for array, _ in made]
        self.refs = [ref for _, ref in made]
        self._arena = arena
        self._start, self._size = start, size

    def detach(self, number: int) -> Array:
        """Return array `number` for the caller to keep: the block is freed with its last view.

        Returns a copy where more than half of the arena is allocated, so that results that are kept leave
        room for requests.
        """
        array = self.arrays[number]
        if 2 * self._arena.allocated_bytes > self._arena.size:
            return array.copy()
        size, self._size = self._size, 0
        return self._arena.detach(array, self._start, size)

    def free(self) -> None:
        """Free the block, unless an array was detached or it is free already."""
        self._arena.free(self._start, self._size)
        self._size = 0


class _BlockOwner:
    """Owns the memory of a detached array: NumPy keeps it alive as long as any view of the array."""

    def __init__(self, array: Array, dropped: deque[tuple[int, int]], start: int, size: int) -> None:
        self._array = array
        self._dropped = dropped
        self._block = (start, size)
        self.__array_interface__ = array.__array_interface__

    def __del__(self) -> None:
        self._dropped.append(self._block)


def _round_up(size: int) -> int:
    return -(-size // _CACHE_LINE) * _CACHE_LINE
