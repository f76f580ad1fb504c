"""Where the row of a key is: open addressing with linear probing, vectorised over many keys.

The hash table holds 32-bit row numbers only; the keys lie by row in an array of their own, which a table
needs anyway. A quarter to a half of it is in use, so it costs 8 to 16 bytes for each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ParameterError
from insitu.parameters import native
from insitu.parameters.growable_array import GrowableArray
from insitu.parameters.hashing import scramble

Keys = NDArray[np.int64]
RowNumbers = NDArray[np.int32]

_EMPTY = -1
_NONE = np.empty(0, np.intp)
_SMALLEST = 1 << 10
_FULLEST = 0.5
_BLOCK = 1 << 15
"""Keys looked up at a time: what is computed for them stays in the cache."""
MOST_ROWS = 2**31 - 2


class KeyIndex:
    """Keys, int64, in the order in which they came; each has the number of its row, from 0."""

    def __init__(self, limit: int | None = None) -> None:
        self.keys = GrowableArray((), np.dtype(np.int64), limit=limit)
        self._table: RowNumbers = np.full(_SMALLEST, _EMPTY, np.int32)

    def __len__(self) -> int:
        return self.keys.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the hash table and the keys."""
        return int(self._table.nbytes) + 8 * len(self)

    def find(self, keys: Keys) -> RowNumbers:
        """The rows of `keys`, int64[n], -1 for each that isn't there."""
        return self.look_up(keys)[0]

    def look_up(self, keys: Keys) -> tuple[RowNumbers, NDArray[np.intp]]:
        """(as `find`; which of `keys` aren't there)."""
        found = np.empty(len(keys), np.int32)
        missing = native.find(keys, self._table, self.keys.array, found)
        if missing is None:
            self._find_all(keys, found)
        return found, _NONE if missing == 0 else np.flatnonzero(found < 0)

    def _find_all(self, keys: Keys, found: RowNumbers) -> None:
        for low in range(0, len(keys), _BLOCK):
            found[low : low + _BLOCK] = self._find(keys[low : low + _BLOCK])

    def _find(self, keys: Keys) -> RowNumbers:
        places = self._home(keys)
        found = np.take(self._table, places, mode="clip")
        # A row number of -1 looks up the key of row 0, which is ruled out by the number itself.
        known = np.take(self.keys.array, found, mode="clip")
        wrong = np.flatnonzero((known != keys) & (found != _EMPTY))
        mask = len(self._table) - 1
        places, sought = places.take(wrong), keys.take(wrong)
        while wrong.size:
            places += 1
            places &= mask
            here = np.take(self._table, places, mode="clip")
            found[wrong] = here
            known = np.take(self.keys.array, here, mode="clip")
            left = np.flatnonzero((known != sought) & (here != _EMPTY))
            wrong, places, sought = wrong.take(left), places.take(left), sought.take(left)
        return found

    def _home(self, keys: Keys) -> NDArray[np.int64]:
        words = scramble(keys.view(np.uint64))
        words &= np.uint64(len(self._table) - 1)
        return words.view(np.int64)

    def add(self, keys: Keys) -> RowNumbers:
        """Gives new rows to `keys`, which are distinct and not there yet; returns the rows, ascending."""
        if len(self) + len(keys) > MOST_ROWS:
            raise ParameterError(f"A table holds at most {MOST_ROWS:,} rows on one server")
        first = self.keys.extend(len(keys))
        self.keys.array[first : first + len(keys)] = keys
        rows = np.arange(first, first + len(keys), dtype=np.int32)
        if len(self) > _FULLEST * len(self._table):
            self.rebuild()
        else:
            self._insert(keys, rows)
        return rows

    def rebuild(self) -> None:
        """Makes the hash table anew from the keys, of a size that leaves it a quarter full or less."""
        size = _SMALLEST
        while len(self) > 0.5 * _FULLEST * size:
            size *= 2
        self._table = np.full(size, _EMPTY, np.int32)
        step = 1 << 20
        for low in range(0, len(self), step):
            high = min(len(self), low + step)
            self._insert(self.keys.array[low:high], np.arange(low, high, dtype=np.int32))

    def _insert(self, keys: Keys, rows: RowNumbers) -> None:
        table, mask = self._table, len(self._table) - 1
        places = self._home(keys)
        while rows.size:
            free = table[places] == _EMPTY
            # Of several that want one place the last is written; all look who it was.
            table[places[free]] = rows[free]
            left = table[places] != rows
            places, rows = (places[left] + 1) & mask, rows[left]


def distinct(keys: Any) -> tuple[Keys, NDArray[np.intp]]:
    """(distinct keys ascending, which of them each key is)."""
    found, inverse = np.unique(keys, return_inverse=True)
    return found, inverse.reshape(-1)
