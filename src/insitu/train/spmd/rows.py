"""Plan where the rows of a step lie in the global arrays of a mesh. Pure.

Each process contributes as many rows to a global array, so short parts are padded with rows of zeros. The
program cuts them off again before it computes anything, so that no row but the batch's ever counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a global batch in the global arrays. Equal plans are the same program."""

    length: int
    """Rows that each process contributes: a multiple of its devices on the data axis."""
    pieces: tuple[tuple[int, int], ...]
    """Half-open intervals of the global array that hold rows, in shard order, neighbours joined."""
    total: int
    """All rows of the global array."""

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return sum(stop - start for start, stop in self.pieces)

    @property
    def whole(self) -> bool:
        """No row of the global array is filled up, and all are in order."""
        return self.pieces == ((0, self.total),)


def plan_rows(counts: Sequence[int], hosts: Sequence[Sequence[int]], devices: int) -> RowPlan:
    """Return the plan for shards with `counts` rows each. `hosts[p]` are the shards of process p, whose rows
    follow each other in that order; `devices` is the number of one process' devices on the data axis."""
    longest = max(sum(counts[shard] for shard in shards) for shards in hosts)
    length = -(-longest // devices) * devices
    intervals = {}
    for process, shards in enumerate(hosts):
        start = process * length
        for shard in shards:
            intervals[shard] = (start, start + counts[shard])
            start += counts[shard]
    pieces: list[tuple[int, int]] = []
    for shard in sorted(intervals):
        start, stop = intervals[shard]
        if start == stop:
            continue
        if pieces and pieces[-1][1] == start:
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((start, stop))
    return RowPlan(length, tuple(pieces), length * len(hosts))
