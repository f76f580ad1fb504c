"""Where the rows of a step lie in the global arrays of a mesh. Pure.

Each process gives as many rows to a global array, so short parts are filled up with rows of zeros. They are
cut off again inside the program, before anything is computed, so that no row but the batch's ever counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How a global batch is put together. Equal plans are the same program.

    `length` is the number of rows that each process gives, a multiple of its devices on the data axis;
    `pieces` are the half-open intervals of the global array that hold rows, in shard order, neighbours
    joined; `total` is the number of all rows of the global array.
    """

    length: int
    pieces: tuple[tuple[int, int], ...]
    total: int

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return sum(stop - start for start, stop in self.pieces)

    @property
    def whole(self) -> bool:
        """No row of the global array is filled up, and all are in order."""
        return self.pieces == ((0, self.total),)


def plan_rows(counts: Sequence[int], hosts: Sequence[Sequence[int]], devices: int) -> RowPlan:
    """The plan for shards with `counts` rows each. `hosts[p]` are the shards of process p, whose rows follow
    each other in that order; `devices` are those of one process on the data axis."""
    longest = max(sum(counts[shard] for shard in shards) for shards in hosts)
    length = -(-longest // devices) * devices
    places = {}
    for process, shards in enumerate(hosts):
        start = process * length
        for shard in shards:
            places[shard] = (start, start + counts[shard])
            start += counts[shard]
    pieces: list[tuple[int, int]] = []
    for shard in sorted(places):
        start, stop = places[shard]
        if start == stop:
            continue
        if pieces and pieces[-1][1] == start:
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((start, stop))
    return RowPlan(length, tuple(pieces), length * len(hosts))
