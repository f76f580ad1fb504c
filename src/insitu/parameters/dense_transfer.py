"""Moves dense gradients and values between messages, a worker's shared memory and a server's flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError
from insitu.parameters import native
from insitu.parameters.connection import Connection
from insitu.parameters.rules import Message, ShardingPlan, as_dtype
from insitu.parameters.server_state import ServerState, ValueDestination

Array = NDArray[Any]


class DenseTransfer:
    """Finds the arrays that a request names, for one server.

    A request names a worker's buffers in shared memory by "segment" and "at", the start of each group in
    bytes. Without them, it carries arrays.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        #: By group, memory in which the parts of a push are joined.
        self._joined: dict[str, Array] = {}

    def read(self, connection: Connection, message: Message, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the server's own elements of each group, flat.

        `arrays` are those of the message that belong to dense variables: one for each span of each group, or
        one for each group where the message is marked "flat". Raises InputError.
        """
        plan = self._state.plan
        if plan is None:
            raise InputError(
                "Variables must be defined (Client.define) before anything else is done with them"
            )
        in_memory = "at" in message.meta
        flats, used = {}, 0
        for position, group in enumerate(plan.groups):
            if in_memory:
                parts = self._view_spans(connection, message, position, group)
            else:
                spans = plan.spans_of(self._state.server, group)
                count = 1 if message.meta.get("flat") else len(spans)
                parts = [array.reshape(-1) for array in arrays[used : used + count]]
                used += count
            flats[group] = self._join(parts, group)
        return flats

    def _join(self, parts: Sequence[Array], group: str) -> Array:
        """Return the parts as one flat array: a view where there is only one.

        The memory is used again by the next push, except in mode sync, where pushes may be held.
        """
        dtype = as_dtype(group)
        if any(part.dtype != dtype for part in parts):
            received = ", ".join(sorted({part.dtype.name for part in parts}))
            raise InputError(f"A push of {dtype.name} variables must be {dtype.name}. Received: {received}")
        if len(parts) == 1:
            return parts[0]
        size = sum(part.size for part in parts)
        joined = self._joined.get(group)
        if joined is None or joined.size != size or self._state.policy.mode == "sync":
            joined = self._joined[group] = np.empty(size, dtype)
        return np.concatenate(parts, out=joined) if parts else joined

    def find_destination(self, connection: Connection, message: Message) -> ValueDestination | None:
        """Return the memory, named by "ahead", for the values that the worker pulls next."""
        plan = self._state.plan
        if plan is None:
            return None
        parts = {}
        for position, group in enumerate(plan.groups):
            views = self._view_spans(connection, message, position, group, "ahead")
            starts = [span.server_offset for span in plan.spans_of(self._state.server, group)]
            parts[group] = list(zip(starts, views, strict=True))
        return ValueDestination(parts)

    def write_values(self, connection: Connection, message: Message, plan: ShardingPlan) -> None:
        """Copy the server's values into the worker's memory."""
        borrowed = connection.borrow(message.meta["segment"])
        borrowed.begin()
        try:
            for position, group in enumerate(plan.groups):
                views = self._view_spans(connection, message, position, group)
                values = self._state.values[group]
                for span, view in zip(plan.spans_of(self._state.server, group), views, strict=True):
                    native.copy_and_check(view, values[span.server_offset : span.server_offset + span.size])
        finally:
            borrowed.end()

    def _view_spans(
        self, connection: Connection, message: Message, position: int, group: str, field: str = "at"
    ) -> list[Array]:
        """Return views of the server's spans of a group in the worker's memory, whose start is
        `message.meta[field][position]`. They are kept on the connection, as each message needs them."""
        segment, start = int(message.meta["segment"]), int(message.meta[field][position])
        key = (self._state.server, segment, start, group)
        if key not in connection.views:
            connection.views[key] = self._make_views(connection, segment, start, group)
        views: list[Array] = connection.views[key]
        return views

    def _make_views(self, connection: Connection, number: int, start: int, group: str) -> list[Array]:
        plan, dtype = self._state.plan, as_dtype(group)
        segment = connection.segments.get(number)
        if plan is None or segment is None:
            raise InputError(
                "Variables must be defined and shared memory attached before a message names them. "
                f"Received: segment {number}"
            )
        size = plan.sizes[group]
        memory = segment.array()
        if start < 0 or start % dtype.itemsize or start + size * dtype.itemsize > memory.size:
            raise InputError(
                f"A buffer must lie within {memory.size} bytes of shared memory. "
                f"Received: {size} {group} at {start}"
            )
        whole = memory[start : start + size * dtype.itemsize].view(dtype)
        return [whole[s.offset : s.offset + s.size] for s in plan.spans_of(self._state.server, group)]
