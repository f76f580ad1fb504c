"""The transport of a process that is alone: the same sums, nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange.arithmetic import Reducer, chunks, coefficients
from insitu.exchange.transport import Members, Reduction, RunReduction, WaitStats

_PIECE = 64 * 1024
"""Elements summed at a time, so that they stay in the processor's cache."""


class SoloTransport:
    """A Transport for one member with any number of shards."""

    name = "solo"

    def __init__(self, members: Members) -> None:
        self._members = members
        self.account = WaitStats()

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        return np.zeros(size, np.uint8) if keep is None else keep

    def reduction(self, reduction: Reduction) -> RunReduction:
        length = min(_PIECE, reduction.length)
        reducer = Reducer(reduction.op, reduction.dtype, self._members.num_shards, length)
        start, stop = reduction.scatter or (0, reduction.length)
        pieces = [
            ([row[low:high] for row in reduction.rows], reduction.result[low - start : high - start])
            for low, high in chunks(start, stop, _PIECE)
        ]

        def run(weights: Sequence[float] | None) -> bool:
            factors = None if weights is None else coefficients(weights, reduction.dtype)
            if weights is not None and factors is None:
                return False
            for rows, out in pieces:
                reducer.reduce(rows, out, factors)
            return True

        return run

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, what: str) -> None:
        for shard, row in enumerate(rows):
            out[shard] = row

    def broadcast(self, data: np.ndarray, root: int, what: str) -> None:
        pass

    def close(self) -> None:
        pass
