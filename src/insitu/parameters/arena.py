"""Shared memory that a worker lends to one request at a time: keys, and rows that come or go, aren't sent to
servers of the same host, but lie where both see them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.exchange import memory
from insitu.parameters.wire import Array, BufferRef

SIZE = 32 << 20
"""Bytes. Requests for which there is no room at the moment are sent."""
_LINE = 64


class Arena:
    """One segment, lent in blocks; first fit. Not for several threads, but for arrays that are given back."""

    SEGMENT = 2

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.descriptor = memory.create("insitu-rows", size)
        self._memory = memory.Segment(os.dup(self.descriptor), size).array()
        self._free: list[tuple[int, int]] = [(0, size)]
        """(start, stop) of what isn't lent, ascending."""
        self._returned: deque[tuple[int, int]] = deque()
        """(start, size) of what is to be lent again: arrays end at any time, in any thread."""

    def lend(self, shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> Allocation | None:
        """Arrays of these shapes and dtypes, together; None where there is no room."""
        self._collect()
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in shapes]
        needed = sum(-(-size // _LINE) * _LINE for size in sizes)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= needed:
                self._free[index : index + 1] = [(start + needed, stop)] if stop - start > needed else []
                return Allocation(self, start, needed, self._cut(start, sizes, shapes))
        return None

    def _cut(
        self, start: int, sizes: Sequence[int], shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> list[tuple[Array, BufferRef]]:
        parts = []
        for size, (shape, dtype) in zip(sizes, shapes, strict=True):
            array = self._memory[start : start + size].view(dtype).reshape(shape)
            parts.append((array, BufferRef(self.SEGMENT, start)))
            start += -(-size // _LINE) * _LINE
        return parts

    def take_back(self, start: int, size: int) -> None:
        """What was lent may be lent again."""
        if not size:
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (start, start + size)]):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged

    def _collect(self) -> None:
        while self._returned:
            self.take_back(*self._returned.popleft())

    def hand_out(self, array: Array, start: int, size: int) -> Array:
        """`array`, which lies in a block that was lent, as one whose last view gives the block back."""
        return np.asarray(_BlockOwner(array, self._returned, start, size))

    def shown(self) -> dict[str, Any]:
        """What a server must know to see it."""
        return {"segment": self.SEGMENT, "descriptor": self.descriptor, "size": self.size}

    @property
    def lent(self) -> int:
        """Bytes that are lent at the moment."""
        self._collect()
        return self.size - sum(stop - start for start, stop in self._free)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Allocation:
    """`arrays` of shared memory and the `places` where they lie, until `give_back`."""

    def __init__(self, arena: Arena, start: int, size: int, parts: list[tuple[Array, BufferRef]]) -> None:
        self.arrays = [array for array, _ in parts]
        self.places = [place for _, place in parts]
        self._arena = arena
        self._start, self._size = start, size

    def hand_out(self, number: int) -> Array:
        """Array `number`, with which the loan ends: see `Arena.hand_out`. A copy where most of the arena is
        lent: others need it, too."""
        array = self.arrays[number]
        if 2 * self._arena.lent > self._arena.size:
            return array.copy()
        size, self._size = self._size, 0
        return self._arena.hand_out(array, self._start, size)

    def give_back(self) -> None:
        self._arena.take_back(self._start, self._size)
        self._size = 0


class _BlockOwner:
    """The memory of an array in the arena; NumPy keeps this as long as anybody has a view of it."""

    def __init__(self, array: Array, returned: deque[tuple[int, int]], start: int, size: int) -> None:
        self._array = array
        self._returned = returned
        self._block = (start, size)
        self.__array_interface__ = array.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._block)
