"""The transport of a group of one process: the same sums without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange.plan import (
    Members,
    Reducer,
    Reduction,
    RunReduction,
    WaitStats,
    compute_factors,
    split_chunks,
)

_PIECE_LENGTH = 64 * 1024
"""Elements that are summed at once: they stay in the processor's cache."""


class SoloTransport:
    """A Transport for one member with any number of shards."""

    name = "solo"

    def __init__(self, members: Members) -> None:
        self._members = members
        self.wait_stats = WaitStats()

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """See Transport."""
        return np.zeros(size, np.uint8) if keep is None else keep

    def prepare(self, reduction: Reduction) -> RunReduction:
        """See Transport."""
        length = min(_PIECE_LENGTH, reduction.length)
        reducer = Reducer(reduction.op, reduction.dtype, self._members.num_shards, length)
        start, stop = reduction.scatter or (0, reduction.length)
        pieces = [
            ([row[low:high] for row in reduction.rows], reduction.result[low - start : high - start])
            for low, high in split_chunks(start, stop, _PIECE_LENGTH)
        ]

        def run(weights: Sequence[float] | None) -> bool:
            factors = None if weights is None else compute_factors(weights, reduction.dtype)
            if weights is not None and factors is None:
                return False
            for rows, out in pieces:
                reducer.reduce(rows, out, factors)
            return True

        return run

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, label: str) -> None:
        """See Transport."""
        for shard, row in enumerate(rows):
            out[shard] = row

    def broadcast(self, data: np.ndarray, root: int, label: str) -> None:
        """See Transport."""

    def close(self) -> None:
        """See Transport."""
