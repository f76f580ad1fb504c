"""The rows of one step, by shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's rows of a step. `data` is None where `rows` is 0. `origins` as in `grid.Batch`."""

    shard: int
    rows: int
    data: Any
    origins: tuple[tuple[int, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's parts, one for each shard of this task.

    `epoch` is that of the data, which is not Keras' where `steps_per_epoch` cuts epochs of its own; `last`
    says that no step of that epoch follows. A skipped step was done before this task came.
    """

    epoch: int
    parts: tuple[Part, ...]
    last: bool = False
    skipped: bool = False

    @property
    def shards(self) -> tuple[int, ...]:
        return tuple(part.shard for part in self.parts)


SKIPPED = StepBatch(-1, (), skipped=True)
