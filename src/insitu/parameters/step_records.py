"""Keeps the records of the pushes that made each update, so that every worker learns of all rows' metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RECORDS_KEPT = 32 << 20
"""Bytes of records that are kept for workers that come late."""


class StepRecords:
    """The records of the last updates, each float64[size], in the order in which their pushes were added."""

    def __init__(self, limit: int = RECORDS_KEPT) -> None:
        """`limit`: bytes of records that are kept."""
        self._limit = limit
        #: (version before the update, float64[pushes, size]) of each update.
        self._updates: deque[tuple[int, Array]] = deque()
        self._bytes = 0
        #: The version from which on all are kept; None before the first.
        self._start: int | None = None

    def add(self, version: int, records: Sequence[Array]) -> None:
        """Keep the records of the update at `version`."""
        if not records:
            return
        if self._start is None:
            self._start = version
        joined = np.stack(records)
        self._updates.append((version, joined))
        self._bytes += joined.nbytes
        while self._bytes > self._limit and len(self._updates) > 1:
            dropped, first = self._updates.popleft()
            self._start, self._bytes = dropped + 1, self._bytes - first.nbytes

    def since(self, version: int) -> tuple[Array, int]:
        """Return the records of all updates from `version` on, float64[pushes, size], and of how many
        updates they aren't kept any more."""
        found = []
        for at, records in reversed(self._updates):
            if at < version:
                break
            found.append(records)
        missing = 0 if self._start is None else max(0, self._start - version)
        return (np.concatenate(found[::-1]) if found else np.zeros((0, 0))), missing
