"""A worker's buffers for dense variables: the values that it pulls and the gradients that it pushes.

They lie in memory that servers of the same host share, so that nothing is copied or sent to them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError
from insitu.exchange import GRANT_BYTES, Lender, memory
from insitu.exchange.plan import PAGE
from insitu.parameters.rules import ShardingPlan, as_dtype
from insitu.parameters.server_connection import ServerConnection

Array = NDArray[Any]


class WorkerBuffers:
    """One flat array for each group of a plan: one set for the values, and one for each shard's gradients.

    Where a method takes `shard`, None means the values.
    """

    SEGMENT = 1
    """Number of the segment on each connection; see `Arena.SEGMENT` for the other one."""

    def __init__(self, plan: ShardingPlan, shards: Sequence[int], shared: bool) -> None:
        """`shared`: some server is on this host."""
        self.plan = plan
        #: Whether the buffers lie in a segment of shared memory.
        self.shared = shared
        self._offsets: dict[int | None, list[int]] = {}
        size = 0
        for shard in (None, *shards):
            self._offsets[shard] = []
            for group in plan.groups:
                self._offsets[shard].append(size)
                size += -(-plan.sizes[group] * as_dtype(group).itemsize // PAGE) * PAGE
        #: Bytes of all buffers together.
        self.size = size
        #: File descriptor of the segment; -1 where nothing is shared, or once closed.
        self.descriptor = -1
        #: Grants servers the right to write, and takes it back; None where nothing is shared.
        self.lender: Lender | None = None
        if shared:
            self.descriptor = memory.create("insitu-parameters", size + GRANT_BYTES)
            segment = memory.Segment(os.dup(self.descriptor), size + GRANT_BYTES)
            self.lender = Lender(segment, size)
            self._memory = segment.array()
        else:
            self._memory = np.zeros(size, np.uint8)

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

    def is_shared_with(self, server: ServerConnection) -> bool:
        """Return whether a server sees these buffers."""
        return self.shared and server.shares_memory

    def locate_parts(self, server: ServerConnection, shard: int | None) -> tuple[dict[str, Any], list[Array]]:
        """Return (meta, arrays) with which a request names a server's parts: their position in shared memory,
        or the arrays themselves."""
        if self.is_shared_with(server):
            return {"segment": self.SEGMENT, "at": self.offsets_of(shard)}, []
        return {}, self.view_parts(server.server, shard)

    def inline_pending(self, server: ServerConnection) -> None:
        """Rewrite the unanswered requests to a server that doesn't see these buffers, so that they carry the
        arrays when they are sent again."""
        for request in server.pending.values():
            request.meta.pop("ahead", None)
            if request.meta.pop("at", None) is None:
                continue
            del request.meta["segment"]
            if request.meta["op"] != "pull":
                parts = self.view_parts(server.server, request.meta.get("shard"))
                request.arrays = [*parts, *request.arrays]

    def close(self) -> None:
        """Close the file descriptor. Arrays stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


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
