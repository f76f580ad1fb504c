"""Keeps what all shards bring to a place, so that each gets everybody's: a gather over the first server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from insitu.parameters.rules import Array

GATHERINGS_BYTES = 32 << 20
"""Bytes that are kept for workers that come to a place again, after a restart."""


class Gatherings:
    """The arrays of the shards, each float64[rows, size], by place. A place is any text."""

    def __init__(self, limit: int = GATHERINGS_BYTES) -> None:
        """`limit`: bytes that are kept; the places that were opened first are forgotten first."""
        self._limit = limit
        self._brought: dict[str, dict[int, Array]] = {}
        self._bytes = 0

    def bring(self, meta: Mapping[str, Any], array: Array) -> None:
        """Keep what a worker brings for its "shards" to a "place": so many "rows" of `array` for each. What a
        shard has brought before stays, as others may have it."""
        place, stop = str(meta["place"]), 0
        brought = self._brought.setdefault(place, {})
        for shard, rows in zip(meta["shards"], meta["rows"], strict=True):
            start, stop = stop, stop + int(rows)
            if int(shard) not in brought:
                brought[int(shard)] = np.array(array[start:stop])
                self._bytes += brought[int(shard)].nbytes
        while self._bytes > self._limit and len(self._brought) > 1:
            forgotten = self._brought.pop(next(iter(self._brought)))
            self._bytes -= sum(one.nbytes for one in forgotten.values())

    def find(self, place: str, awaited: Collection[int]) -> tuple[dict[str, Any], list[Array]] | None:
        """Return a description with the "shards" that came, and their arrays as one, in the order of shards;
        None while one of `awaited` is missing."""
        brought = self._brought.get(place, {})
        if not brought or any(shard not in brought for shard in awaited):
            return None
        shards = sorted(brought)
        return {"shards": shards}, [np.concatenate([brought[shard] for shard in shards])]
