"""Pure: how stale the gradients were when they were applied, in updates, by powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class StalenessHistogram:
    """Counts of 0, 1, 2 to 3, 4 to 7, ... `counts[i]` is of those with i binary digits."""

    counts: list[int] = field(default_factory=list)
    total: int = 0
    """The sum of all that was counted."""
    largest: int = 0

    def add(self, staleness: int) -> None:
        """`staleness` in updates between the pull and the push, at least 0."""
        bucket = staleness.bit_length()
        if bucket >= len(self.counts):
            self.counts.extend([0] * (bucket + 1 - len(self.counts)))
        self.counts[bucket] += 1
        self.total += staleness
        self.largest = max(self.largest, staleness)

    def rows(self) -> list[tuple[str, int]]:
        """(interval as `2-3`, count) from 0 to the largest that occurred."""
        return [(_interval(bucket), count) for bucket, count in enumerate(self.counts)]

    @property
    def mean(self) -> float:
        counted = sum(self.counts)
        return self.total / counted if counted else 0.0

    def to_json(self) -> dict[str, object]:
        return {"counts": list(self.counts), "total": self.total, "largest": self.largest}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> StalenessHistogram:
        counts = data["counts"]
        if not isinstance(counts, Sequence):
            raise TypeError(f"counts must be a list. Received: {counts!r}")
        return cls([int(c) for c in counts], int(str(data["total"])), int(str(data["largest"])))


def _interval(bucket: int) -> str:
    if bucket < 2:
        return str(bucket)
    return f"{1 << bucket - 1}-{(1 << bucket) - 1}"
