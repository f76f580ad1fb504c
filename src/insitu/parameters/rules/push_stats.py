"""Pure: counts of what became of pushes, and how stale their gradients were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StalenessHistogram:
    """Counts of staleness by powers of two: 0, 1, 2 to 3, 4 to 7, ...

    The staleness of a gradient is the number of updates between the pull of the values that it was computed
    on and its own update.
    """

    #: `counts[i]` is how many values with i binary digits were added.
    counts: list[int] = field(default_factory=list)
    #: Sum of all values that were added.
    total: int = 0
    #: Largest value that was added.
    largest: int = 0

    def add(self, staleness: int) -> None:
        """Count one value, at least 0."""
        bucket = staleness.bit_length()
        if bucket >= len(self.counts):
            self.counts.extend([0] * (bucket + 1 - len(self.counts)))
        self.counts[bucket] += 1
        self.total += staleness
        self.largest = max(self.largest, staleness)

    def rows(self) -> list[tuple[str, int]]:
        """Return (interval such as `2-3`, count) from 0 to the largest value."""
        return [(_format_interval(bucket), count) for bucket, count in enumerate(self.counts)]

    @property
    def mean(self) -> float:
        """Mean of all values; 0 if there are none."""
        counted = sum(self.counts)
        return self.total / counted if counted else 0.0

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` reads."""
        return {"counts": list(self.counts), "total": self.total, "largest": self.largest}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> StalenessHistogram:
        """Return the histogram that `to_json` described. Raises TypeError, KeyError, ValueError."""
        counts = data["counts"]
        if not isinstance(counts, Sequence):
            raise TypeError(f"counts must be a list. Received: {counts!r}")
        return cls([int(c) for c in counts], int(str(data["total"])), int(str(data["largest"])))


def _format_interval(bucket: int) -> str:
    if bucket < 2:
        return str(bucket)
    return f"{1 << bucket - 1}-{(1 << bucket) - 1}"


@dataclass
class PushStats:
    """Counts since the server's state was created. `ServerState` writes them; checkpoints keep them."""

    #: Pushes that became part of an update.
    applied: int = 0
    #: Rows of data whose gradients were applied.
    rows: int = 0
    #: Pushes that came too late for their step (mode sync).
    dropped: int = 0
    #: Rows of data whose gradients were dropped.
    dropped_rows: int = 0
    #: Pushes that had been consumed before, and were answered again.
    repeated: int = 0
    #: Pushes that failed with SequenceError or NotFinite.
    refused: int = 0
    #: Elements that weren't finite and were taken as 0 (nan="clip").
    clipped: int = 0
    #: Pushes that a server had consumed after the checkpoint that it was later restored from.
    lost: int = 0
    #: Rows of data whose gradients were dropped, by shard.
    dropped_by_shard: dict[int, int] = field(default_factory=dict)
    #: Staleness of the pushes that were applied.
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads; also part of what `Client.stats` returns."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        by_shard = sorted(self.dropped_by_shard.items())
        return {**counts, "dropped_by_shard": by_shard, "staleness": self.staleness.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PushStats:
        """Return the counts that `to_json` described."""
        return cls(
            **{
                **data,
                "dropped_by_shard": {int(s): int(n) for s, n in data["dropped_by_shard"]},
                "staleness": StalenessHistogram.from_json(data["staleness"]),
            }
        )
