"""Finds the row of each key: a hash table with linear probing, which looks up many keys at a time.

The buckets hold 32-bit row numbers only. The keys lie by row in an array of their own, which a table needs
anyway. A quarter to a half of the buckets is in use, so each row costs 8 to 16 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ParameterError
from insitu.parameters import native
from insitu.parameters.growable_array import GrowableArray
from insitu.parameters.rules import mix64

Keys = NDArray[np.int64]
RowNumbers = NDArray[np.int32]

_EMPTY = -1
_NO_ROWS = np.empty(0, np.intp)
_MIN_BUCKETS = 1 << 10
_MAX_LOAD = 0.5
"""Most of the buckets that may be in use."""
_BLOCK_KEYS = 1 << 15
"""Keys looked up at a time, so that scratch memory stays in the cache."""
MAX_ROWS = 2**31 - 2


class HashIndex:
    """Gives each key, int64, the number of its row, from 0 in the order in which keys were added."""

    def __init__(self, limit: int | None = None) -> None:
        #: The key of each row.
        self.keys = GrowableArray((), np.dtype(np.int64), limit=limit)
        #: Row numbers, _EMPTY where there is none; a power of two of them.
        self._buckets: RowNumbers = np.full(_MIN_BUCKETS, _EMPTY, np.int32)

    def __len__(self) -> int:
        return self.keys.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets and the keys."""
        return int(self._buckets.nbytes) + 8 * len(self)

    def find(self, keys: Keys) -> RowNumbers:
        """Return the rows of `keys`, int64[n]; -1 for each key that isn't there."""
        return self.find_with_missing(keys)[0]

    def find_with_missing(self, keys: Keys) -> tuple[RowNumbers, NDArray[np.intp]]:
        """Return (the result of `find`; the indices of `keys` that aren't there)."""
        found = np.empty(len(keys), np.int32)
        missing = native.find(keys, self._buckets, self.keys.array, found)
        if missing is None:
            self._probe_blocks(keys, found)
        return found, _NO_ROWS if missing == 0 else np.flatnonzero(found < 0)

    def _probe_blocks(self, keys: Keys, found: RowNumbers) -> None:
        for low in range(0, len(keys), _BLOCK_KEYS):
            found[low : low + _BLOCK_KEYS] = self._probe(keys[low : low + _BLOCK_KEYS])

    def _probe(self, keys: Keys) -> RowNumbers:
        buckets = self._hash_to_buckets(keys)
        found = np.take(self._buckets, buckets, mode="clip")
        # _EMPTY, clipped, reads the key of row 0; such buckets are excluded by the number itself.
        known = np.take(self.keys.array, found, mode="clip")
        wrong = np.flatnonzero((known != keys) & (found != _EMPTY))
        mask = len(self._buckets) - 1
        buckets, sought = buckets.take(wrong), keys.take(wrong)
        while wrong.size:
            buckets += 1
            buckets &= mask
            present = np.take(self._buckets, buckets, mode="clip")
            found[wrong] = present
            known = np.take(self.keys.array, present, mode="clip")
            left = np.flatnonzero((known != sought) & (present != _EMPTY))
            wrong, buckets, sought = wrong.take(left), buckets.take(left), sought.take(left)
        return found

    def _hash_to_buckets(self, keys: Keys) -> NDArray[np.int64]:
        words = mix64(keys.view(np.uint64))
        words &= np.uint64(len(self._buckets) - 1)
        return words.view(np.int64)

    def add(self, keys: Keys) -> RowNumbers:
        """Add `keys`, distinct and not there yet. Return their rows, ascending. Raises ParameterError."""
        if len(self) + len(keys) > MAX_ROWS:
            raise ParameterError(
                f"A table holds at most {MAX_ROWS:,} rows on one server. Received: "
                f"{len(self) + len(keys):,}. Use more servers (--ps), or let rows be evicted"
            )
        first = self.keys.extend(len(keys))
        self.keys.array[first : first + len(keys)] = keys
        rows = np.arange(first, first + len(keys), dtype=np.int32)
        if len(self) > _MAX_LOAD * len(self._buckets):
            self.rebuild()
        else:
            self._insert(keys, rows)
        return rows

    def rebuild(self) -> None:
        """Fill new buckets from the keys, as many as leave them a quarter full or less."""
        size = _MIN_BUCKETS
        while len(self) > 0.5 * _MAX_LOAD * size:
            size *= 2
        self._buckets = np.full(size, _EMPTY, np.int32)
        step = 1 << 20
        for low in range(0, len(self), step):
            high = min(len(self), low + step)
            self._insert(self.keys.array[low:high], np.arange(low, high, dtype=np.int32))

    def _insert(self, keys: Keys, rows: RowNumbers) -> None:
        table, mask = self._buckets, len(self._buckets) - 1
        buckets = self._hash_to_buckets(keys)
        while rows.size:
            free = table[buckets] == _EMPTY
            # Of several rows for one bucket the last is written; the others then see that it isn't theirs.
            table[buckets[free]] = rows[free]
            left = table[buckets] != rows
            buckets, rows = (buckets[left] + 1) & mask, rows[left]


def find_distinct(keys: Any) -> tuple[Keys, NDArray[np.intp]]:
    """Return (distinct keys ascending; for each key, its index among these)."""
    found, inverse = np.unique(keys, return_inverse=True)
    return found, inverse.reshape(-1)
