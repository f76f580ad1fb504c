"""A worker's buffers: the values that it pulls and the gradients that it pushes, in memory that the servers
of its host see too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError
from insitu.exchange import memory
from insitu.exchange.arithmetic import PAGE
from insitu.parameters.sharding_plan import ShardingPlan, as_dtype

Array = NDArray[Any]


class WorkerBuffers:
    """One flat array for each group of a layout: of values, and of gradients for each shard.

    With `shared`, all lie in one segment of shared memory, whose descriptor is `descriptor` and whose number
    on connections is SEGMENT; `at(...)` says where.
    """

    SEGMENT = 1

    def __init__(self, layout: ShardingPlan, shards: Sequence[int], shared: bool) -> None:
        self.layout = layout
        self.shared = shared
        self._at: dict[int | None, list[int]] = {}
        size = 0
        for row in (None, *shards):
            self._at[row] = []
            for group in layout.groups:
                self._at[row].append(size)
                size += -(-layout.sizes[group] * as_dtype(group).itemsize // PAGE) * PAGE
        self.size = size
        self.descriptor = -1
        if shared:
            self.descriptor = memory.create("insitu-parameters", size)
            self._memory = memory.Segment(os.dup(self.descriptor), size).array()
        else:
            self._memory = np.zeros(size, np.uint8)

    def at(self, shard: int | None) -> list[int]:
        """Where the groups of the values (None), or of a shard's gradients, begin: byte offsets."""
        return self._at[shard]

    def flat(self, group: str, shard: int | None) -> Array:
        """The values (None), or a shard's gradients, of one group."""
        dtype, size = as_dtype(group), self.layout.sizes[group]
        start = self.at(shard)[self.layout.groups.index(group)]
        return self._memory[start : start + size * dtype.itemsize].view(dtype)

    def views(self, shard: int | None) -> dict[str, Array]:
        """Each variable, in its shape, by name."""
        found = {}
        for variable in self.layout.variables:
            start = self.layout.offsets[variable.name]
            flat = self.flat(variable.dtype, shard)
            found[variable.name] = flat[start : start + variable.size].reshape(variable.shape)
        return found

    def parts(self, server: int, shard: int | None) -> list[Array]:
        """The parts of the flat arrays that `server` holds, in the order of groups and spans."""
        return [
            self.flat(group, shard)[span.offset : span.offset + span.size]
            for group in self.layout.groups
            for span in self.layout.spans(server, group)
        ]

    def fill(self, server: int, flats: Sequence[Array]) -> None:
        """Puts what `server` sent, its own elements of each group, into the values."""
        if len(flats) != len(self.layout.groups):
            raise InputError(
                f"{len(self.layout.groups)} groups of values were expected. Received: {len(flats)}"
            )
        for group, flat in zip(self.layout.groups, flats, strict=True):
            for span in self.layout.spans(server, group):
                self.flat(group, None)[span.offset : span.offset + span.size] = flat[
                    span.own : span.own + span.size
                ]

    def close(self) -> None:
        """The arrays stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def as_values(name: str, given: Any, like: Array) -> Array:
    """What was given for variable `name`, as an array. Raises InputError where it isn't `like` it."""
    found = np.asarray(given)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise InputError(
            f"Variable {name!r} is {like.dtype.name}{list(like.shape)}. "
            f"Received: {found.dtype.name}{list(found.shape)}"
        )
    return found
