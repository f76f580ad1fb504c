"""The rows of one step, by shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """One shard's rows of a step."""

    shard: int
    """The shard's number."""
    rows: int
    """The number of rows; 0 if the shard has none in this step."""
    data: Any
    """The batch, a structure of arrays with rows first; None without rows."""
    origins: tuple[tuple[int, Any], ...] = ()
    """(partition, rows) of the rows, as in `grid.Batch`, for the ledger."""
    fingerprint: int = 0
    """A number of the global batch that all processes must agree on, below 2**52; 0 if shards have rows of
    their own."""
    dataset_shards: int = 0
    """Shards of the `insitu.Dataset` that the rows are of; 0 if they are of other data."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The data of one step."""

    epoch: int
    """The epoch of the data. It differs from Keras' epoch if `steps_per_epoch` sets the length of that."""
    parts: tuple[ShardBatch, ...]
    """One for each shard of this task."""
    last: bool = False
    """True if no step of that epoch follows."""
    skipped: bool = False
    """True if other tasks did the step before this task came."""

    @property
    def shards(self) -> tuple[int, ...]:
        return tuple(part.shard for part in self.parts)


SKIPPED = StepBatch(-1, (), skipped=True)
