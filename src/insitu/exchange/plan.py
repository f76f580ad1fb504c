"""Pure: who reduces what of buffers that all members have mapped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.errors import ExchangeError
from insitu.exchange.arithmetic import PAGE, bounds, chunks
from insitu.exchange.transport import Members, Reduction

SCRATCH_BYTES = 512 * 1024
"""Of each member: where it puts a sum before it copies it to the members' buffers."""
_CACHE_BYTES = 512 * 1024
"""What the rows of one piece and its sum may take, so that they stay in the second-level cache."""

ReducePiece = tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]
"""(a piece of every shard's row in shard order, where its sum goes first, where that is copied then)."""


class ReducePlan:
    """One reduction of rows that lie at the beginning of `parts[m]` (uint8) for each member m.

    Each member reduces its own interval of the length, in pieces: the sum goes to its scratch first, and
    only a whole sum is copied over the rows, so that a piece can be finished by another member at any time.
    `longest` is the length of the longest piece in elements; `rows` are all shards' rows in shard order.
    """

    def __init__(
        self,
        reduction: Reduction,
        members: Members,
        parts: Sequence[np.ndarray],
        scratch: np.ndarray,
        piece_bytes: int | None = None,
    ) -> None:
        """`piece_bytes` None: as large as the second-level cache allows."""
        self._reduction = reduction
        self._members = members
        self._scratch = scratch
        self.dtype = reduction.dtype
        self.rows, self.results = self._views(parts)
        size = min(SCRATCH_BYTES, -(-_CACHE_BYTES // (len(self.rows) + 1) // PAGE) * PAGE)
        self.longest = (piece_bytes or max(PAGE, size)) // reduction.dtype.itemsize

    def interval(self, member: int) -> tuple[int, int]:
        """The elements that `member` reduces, half-open."""
        return bounds(self._reduction.length, self._members.size, self.dtype.itemsize)[member]

    def pieces(self, member: int) -> list[ReducePiece]:
        """The part of `member`; of a reduce_scatter, only this process's own is known."""
        wanted = self._reduction.scatter
        if wanted is not None:
            start, stop = wanted
            return [
                ([row[low:high] for row in self.rows], self._reduction.result[low - start : high - start], [])
                for low, high in chunks(start, stop, self.longest)
            ]
        start, stop = self.interval(member)
        total = self._scratch[member].view(self.dtype)
        return [
            (
                [row[low:high] for row in self.rows],
                total[: high - low],
                [result[low:high] for result in self.results],
            )
            for low, high in chunks(start, stop, self.longest)
        ]

    def _views(self, parts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(every shard's row in shard order, every member's result), in this process's mappings."""
        rows: dict[int, np.ndarray] = {}
        results = []
        size = self._reduction.row_bytes
        for rank, part in enumerate(parts):
            shards = self._members.shards[rank]
            needed = max(1, len(shards)) * size
            if len(part) < needed:
                raise ExchangeError(
                    f"{self._reduction} needs {needed} bytes of this buffer; member {rank} has {len(part)}"
                )
            for index, shard in enumerate(shards):
                rows[shard] = part[index * size : (index + 1) * size].view(self.dtype)
            results.append(part[:size].view(self.dtype))
        return [rows[shard] for shard in range(self._members.num_shards)], results
