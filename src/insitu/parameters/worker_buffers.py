"""A worker's memory that servers of its host share, for dense variables and rows of tables.

Nothing is copied or sent to these servers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.exchange import GRANT_BYTES, Lender, memory
from insitu.exchange.plan import PAGE
from insitu.parameters.rules import Array, BufferRef, ShardingPlan, as_dtype
from insitu.parameters.server_connection import DENSE_LANE, ROWS_LANE, ServerConnection


class LentMemory:
    """Memory that servers of this host map, and are granted the right to write to."""

    #: Number of the segment on each connection.
    SEGMENT: int
    #: The lane over which it is handed to a server.
    LANE: int

    def __init__(self, size: int, name: str | None) -> None:
        """`name` is that of the segment; None: the memory isn't shared."""
        #: Bytes of the memory, and with the grants.
        self.size, self.shared_size = size, size + GRANT_BYTES
        #: File descriptor of the segment; -1 if nothing is shared, or once closed.
        self.descriptor = -1
        #: Grants servers the right to write, and takes it back; None if nothing is shared.
        self.lender: Lender | None = None
        if name is None:
            self._memory = np.zeros(size, np.uint8)
            return
        self.descriptor = memory.create(name, self.shared_size)
        segment = memory.Segment(os.dup(self.descriptor), self.shared_size)
        self.lender = Lender(segment, size)
        self._memory = segment.array()

    def is_shared_with(self, server: ServerConnection) -> bool:
        """Return whether a server sees this memory."""
        return self.lender is not None and server.shares_memory

    def inline_pending(self, server: ServerConnection) -> None:
        """Rewrite the unanswered requests to a server that doesn't see this memory, so that they don't need
        it when they are sent again."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file descriptor. Arrays stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class WorkerBuffers(LentMemory):
    """One flat array for each group of a plan: one set for the values, and one for each shard's gradients.

    If a method takes `shard`, None means the values.
    """

    SEGMENT, LANE = 1, DENSE_LANE

    def __init__(self, plan: ShardingPlan, shards: Sequence[int], shared: bool) -> None:
        """`shared`: some server is on this host."""
        self.plan = plan
        self._offsets: dict[int | None, list[int]] = {}
        size = 0
        for shard in (None, *shards):
            self._offsets[shard] = []
            for group in plan.groups:
                self._offsets[shard].append(size)
                size += -(-plan.sizes[group] * as_dtype(group).itemsize // PAGE) * PAGE
        super().__init__(size, "insitu-parameters" if shared else None)

    def offsets_of(self, shard: int | None) -> list[int]:
        """Return the start of each group, in bytes, in the order of the plan's groups."""
        return self._offsets[shard]

    def view_group(self, group: str, shard: int | None) -> Array:
        """Return the flat array of one group."""
        dtype, size = as_dtype(group), self.plan.sizes[group]
        start = self.offsets_of(shard)[self.plan.groups.index(group)]
        return self._memory[start : start + size * dtype.itemsize].view(dtype)

    def view_variables(self, shard: int | None) -> dict[str, Array]:
        """Return a view of each variable, in its shape, by name."""
        views = {}
        for variable in self.plan.variables:
            start = self.plan.offsets[variable.name]
            flat = self.view_group(variable.dtype, shard)
            views[variable.name] = flat[start : start + variable.size].reshape(variable.shape)
        return views

    def view_parts(self, server: int, shard: int | None) -> list[Array]:
        """Return views of the parts that `server` holds, in the order of groups and spans."""
        return [
            self.view_group(group, shard)[span.offset : span.offset + span.size]
            for group in self.plan.groups
            for span in self.plan.spans_of(server, group)
        ]

    def store_values(self, server: int, flats: Sequence[Array]) -> None:
        """Copy the values that `server` sent, its elements of each group, into the buffers."""
        if len(flats) != len(self.plan.groups):
            raise InputError(
                f"Server {server} must send {len(self.plan.groups)} groups of values. Received: {len(flats)}"
            )
        for group, flat in zip(self.plan.groups, flats, strict=True):
            for span in self.plan.spans_of(server, group):
                self.view_group(group, None)[span.offset : span.offset + span.size] = flat[
                    span.server_offset : span.server_offset + span.size
                ]

    # Requests to a server

    def locate_parts(self, server: ServerConnection, shard: int | None) -> tuple[dict[str, Any], list[Array]]:
        """Return (meta, arrays) with which a request names a server's parts: their position in shared memory,
        or the arrays themselves."""
        if self.is_shared_with(server):
            return {"segment": self.SEGMENT, "at": self.offsets_of(shard)}, []
        return {}, self.view_parts(server.server, shard)

    def inline_pending(self, server: ServerConnection) -> None:
        """See `LentMemory`. The requests carry the arrays."""
        for request in server.pending.values():
            request.meta.pop("ahead", None)
            if request.meta.pop("at", None) is None:
                continue
            del request.meta["segment"]
            if request.meta["op"] != "pull":
                parts = self.view_parts(server.server, request.meta.get("shard"))
                request.arrays = [*parts, *request.arrays]


def as_values(name: str, given: Any, like: Array) -> Array:
    """Return `given` as an array for variable `name`. Raises InputError unless it has `like`'s shape and
    dtype."""
    array = np.asarray(given)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise InputError(
            f"Variable {name!r} is {like.dtype.name}{list(like.shape)}. "
            f"Received: {array.dtype.name}{list(array.shape)}"
        )
    return array


# Rows of tables


ARENA_BYTES = 32 << 20
"""If the arena has no room for a request, its arrays are sent over the socket."""
_CACHE_LINE = 64
Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array."""


class Arena(LentMemory):
    """One segment of shared memory, allocated first-fit.

    Only one thread may allocate and free. Arrays that were detached may be dropped in any thread.
    """

    SEGMENT, LANE = 2, ROWS_LANE

    def __init__(self, size: int = ARENA_BYTES) -> None:
        super().__init__(size, "insitu-rows")
        #: (start, stop) in bytes of each free block, ascending.
        self._free: list[tuple[int, int]] = [(0, size)]
        #: (start, size) of blocks whose detached array has been dropped, by whichever thread dropped it.
        self._dropped: deque[tuple[int, int]] = deque()

    def allocate(self, specs: Sequence[Spec]) -> Allocation | None:
        """Allocate arrays of these shapes and dtypes in one block; None if no block is large enough."""
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

    def inline_pending(self, server: ServerConnection) -> None:
        """See `LentMemory`."""
        for request in server.pending.values():
            if request.lane == ROWS_LANE and request.refs:
                # A server that doesn't see the memory for its answer must not get it.
                request.arrays = request.arrays[:1] if request.meta["op"] == "pull_rows" else request.arrays
                request.refs = ()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated now."""
        self._free_dropped()
        return self.size - sum(stop - start for start, stop in self._free)


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

        Returns a copy if more than half of the arena is allocated, so that results that are kept leave
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
