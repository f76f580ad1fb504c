"""Chooses the rows of a dataset that `filter` and `take` leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.grid.layout import Rows, ShuffledPlan
from insitu.grid.reading.cache_reader import CacheReader
from insitu.grid.reading.structure import apply_maps, call_of_batch

_CHUNK_ROWS = 4096
"""Rows that a function given to `filter` gets at once, at most."""

Maps = tuple[Callable[..., Any], ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Leaves the rows for which a function of a batch returns True."""

    #: The function: `fn(features, label)` of a tuple, `fn(batch)` of others.
    fn: Callable[..., Any]
    #: Functions that the batch passes through before, in order.
    maps: Maps = ()


@dataclass(frozen=True, slots=True)
class Take:
    """Leaves some rows, of each shard its share."""

    #: Rows of all shards together.
    count: int


Step = Filter | Take


class Selection:
    """The rows of each shard that the steps leave, one step after the other. Found when they are first asked
    for, once for all datasets that are chained from one."""

    def __init__(self, reader: CacheReader, steps: tuple[Step, ...] = ()) -> None:
        self._reader = reader
        #: The steps, in order.
        self.steps = steps
        #: Positions of the rows that are left, ascending, by shard. Written by `positions`.
        self._positions: dict[int, Rows] = {}
        self._finding = threading.RLock()
        #: The selection without the last step.
        self._before: Selection | None = None

    def then(self, step: Step) -> Selection:
        """Return the selection that `step` leaves of this one."""
        following = Selection(self._reader, (*self.steps, step))
        following._before = self
        return following

    def over(self, reader: CacheReader) -> Selection:
        """Return the same steps over the rows of another reader."""
        found = Selection(reader)
        for step in self.steps:
            found = found.then(step)
        return found

    def count(self, shard: int) -> int:
        """Return the number of rows of the shard that are left."""
        positions = self.positions(shard)
        return self._reader.starts(shard)[-1] if positions is None else len(positions)

    def positions(self, shard: int) -> Rows | None:
        """Return the positions in the shard of the rows that are left, ascending; None for all of them."""
        if self._before is None:
            return None
        with self._finding:
            if shard not in self._positions:
                step = self.steps[-1]
                chosen = (
                    self._take(self._before, step.count, shard)
                    if isinstance(step, Take)
                    else self._filter(self._before, step, shard)
                )
                self._positions[shard] = chosen
            return self._positions[shard]

    def _take(self, before: Selection, count: int, shard: int) -> Rows:
        counts = [before.count(s) for s in range(len(self._reader.shard_map.shards))]
        ends = np.cumsum([0, *counts])
        total = int(ends[-1])
        count = min(count, total)
        start, stop = (int(ends[s]) * count // max(1, total) for s in (shard, shard + 1))
        positions = before.positions(shard)
        return np.arange(stop - start) if positions is None else positions[: stop - start]

    def _filter(self, before: Selection, step: Filter, shard: int) -> Rows:
        starts = self._reader.starts(shard)
        positions = before.positions(shard)
        if positions is None:
            positions = np.arange(starts[-1])
        plan = ShuffledPlan(starts, _CHUNK_ROWS, positions)
        left = [np.empty(0, np.int64)]
        for chunk in range(plan.steps):
            selection = plan.rows_of_batch(chunk)
            data, rows, _ = self._reader.read_rows(shard, None, plan, chunk)
            data = apply_maps(step.maps, data, rows)
            mask = np.asarray(call_of_batch(step.fn, data))
            if mask.shape != (rows,) or mask.dtype != np.bool_:
                name = getattr(step.fn, "__qualname__", repr(step.fn))
                raise InputError(
                    "A function given to Dataset.filter must return one bool per row of the batch. Received "
                    f"from {name}: shape {mask.shape}, dtype {mask.dtype} for {rows} rows"
                )
            read = np.concatenate([starts[k] + found for k, found in selection])
            left.append(read[mask])
        return np.sort(np.concatenate(left))
