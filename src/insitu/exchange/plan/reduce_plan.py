"""Pure: which member reduces which part of buffers that all members have mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from insitu.base.errors import ExchangeError
from insitu.exchange.plan.arithmetic import PAGE, split_by_pages, split_chunks
from insitu.exchange.plan.transport import Members, Reduction

SCRATCH_BYTES = 512 * 1024
"""Scratch memory of each member: a sum is computed there before it is copied to the members' buffers."""
_CACHE_BYTES = 512 * 1024
"""The rows of one piece and its sum together take this much at most: they stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class ReducePiece:
    """A few elements that are summed at once."""

    #: This piece of every shard's row, in shard order.
    rows: list[np.ndarray]
    #: The scratch memory, or the result of a reduce_scatter, where the sum is computed.
    total: np.ndarray
    #: The members' results, where the sum is copied afterwards.
    targets: list[np.ndarray]


class ReducePlan:
    """One reduction of rows that all members have mapped.

    Each member reduces its own interval of the length, in pieces. The sum is computed in the member's scratch
    memory, and only a complete sum is copied over the rows: another member can finish a piece at any time.
    """

    def __init__(
        self,
        reduction: Reduction,
        members: Members,
        parts: Sequence[np.ndarray],
        scratch: np.ndarray,
        piece_bytes: int | None = None,
    ) -> None:
        """Plan `reduction` of the rows at the beginning of `parts[m]` (uint8) for each member m.

        `scratch[m]` is the scratch memory of member m. `piece_bytes` None: as many as the second-level cache
        allows.
        """
        self._reduction = reduction
        self._members = members
        self._scratch = scratch
        self.dtype = reduction.dtype
        rows, results = self._split_parts(parts)
        #: Every shard's row, in shard order, in this process's mappings.
        self.rows = rows
        #: Every member's result.
        self.results = results
        size = min(SCRATCH_BYTES, -(-_CACHE_BYTES // (len(self.rows) + 1) // PAGE) * PAGE)
        #: Elements of the longest piece.
        self.longest = (piece_bytes or max(PAGE, size)) // reduction.dtype.itemsize
        if self.longest * reduction.dtype.itemsize > SCRATCH_BYTES:
            raise ExchangeError(
                f"A row must have 128 GiB at most, so that its pieces fit into {SCRATCH_BYTES} bytes of "
                f"scratch "
                f"memory. Received: {reduction.row_bytes} bytes. Reduce it in parts"
            )

    def get_interval(self, member: int) -> tuple[int, int]:
        """Return the half-open interval of elements that `member` reduces."""
        return split_by_pages(self._reduction.length, self._members.size, self.dtype.itemsize)[member]

    def get_scratch(self, member: int, length: int) -> np.ndarray:
        """Return the first `length` elements of a member's scratch memory."""
        scratch: np.ndarray = self._scratch[member].view(self.dtype)
        return scratch[:length]

    def make_pieces(self, member: int) -> list[ReducePiece]:
        """Return the pieces that `member` reduces. For a reduce_scatter, only this process's own are
        known."""
        scatter = self._reduction.scatter
        if scatter is not None:
            start, stop = scatter
            return [
                ReducePiece(
                    [row[low:high] for row in self.rows],
                    self._reduction.result[low - start : high - start],
                    [],
                )
                for low, high in split_chunks(start, stop, self.longest)
            ]
        start, stop = self.get_interval(member)
        return [
            ReducePiece(
                [row[low:high] for row in self.rows],
                self.get_scratch(member, high - low),
                [result[low:high] for result in self.results],
            )
            for low, high in split_chunks(start, stop, self.longest)
        ]

    def _split_parts(self, parts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (every shard's row in shard order, every member's result)."""
        rows: dict[int, np.ndarray] = {}
        results = []
        size = self._reduction.row_bytes
        for rank, part in enumerate(parts):
            shards = self._members.shards[rank]
            needed = max(1, len(shards)) * size
            if len(part) < needed:
                raise ExchangeError(
                    f"{self._reduction} needs {needed} bytes of this buffer on member {rank}. Received: "
                    f"{len(part)} bytes. Call Group.buffer with a row for each shard on all ranks"
                )
            for index, shard in enumerate(shards):
                rows[shard] = part[index * size : (index + 1) * size].view(self.dtype)
            results.append(part[:size].view(self.dtype))
        return [rows[shard] for shard in range(self._members.num_shards)], results
