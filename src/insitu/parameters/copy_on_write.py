"""The rows of a table as they were at one moment, while the table goes on: for a checkpoint.

Nothing is copied when the moment is taken. Whoever is about to change rows keeps them first: they are copied
to a log that grows, once each, and a note for each row says where it went. A reader copies a block of the
table as it is and only then looks which of its rows have been kept meanwhile or before, and takes these from
the log. As a row is kept before it is changed, what the reader found changed it finds in the log.

So neither side waits for the other. This relies on one thread seeing another's writes in their order, as
processors of the x86 kind have it, and others by the locks that Python takes between the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import CheckpointError, InsituError
from insitu.parameters import native
from insitu.parameters.growable_array import GrowableArray

Array = NDArray[Any]
_MOST = 2**32 - 1


class SavedRowIndex:
    """For each row of a table, where it is in the log of the moment under way. They outlive the moment, since
    memory that was used before costs less than new one: a number that is too low speaks of an older log."""

    def __init__(self, limit: int | None = None) -> None:
        self._numbers = GrowableArray((), np.dtype(np.uint32), limit=limit, huge=False)
        self._base = self._used = 0

    def begin(self, count: int) -> None:
        """A new moment, of a table of `count` rows: none of them is in the log."""
        self._numbers.extend(max(0, count - self._numbers.rows))
        if self._used + count >= _MOST:
            self._numbers.array[: self._numbers.rows] = 0
            self._used = 0
        self._base = self._used

    def missing(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Those of `rows` that aren't in the log."""
        out: NDArray[Any] = rows[self._numbers.array[rows] <= self._base]
        return out

    def add(self, rows: NDArray[Any]) -> None:
        """These came to the end of the log."""
        first = self._used + 1
        self._used += len(rows)
        self._numbers.array[rows] = np.arange(first, self._used + 1, dtype=np.uint32)

    def found(self, low: int, high: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(which of rows [low, high) are in the log, counted from `low`; where there)."""
        numbers = self._numbers.array[low:high]
        which = np.flatnonzero(numbers > self._base)
        return which, numbers[which].astype(np.intp) - self._base - 1


class TableSnapshot:
    """All rows, of several `arrays` by kind: keys, values, slots. One thread keeps, one reads."""

    def __init__(self, arrays: Mapping[str, Array], notes: SavedRowIndex, limit: int | None = None) -> None:
        """`arrays` are those of the table itself. `limit` bytes may be used at most for each kind of the log
        (None: the machine's memory)."""
        self.arrays = dict(arrays)
        self.count = len(next(iter(self.arrays.values())))
        self._unread = dict.fromkeys(self.arrays)
        self._log = {
            kind: GrowableArray(array.shape[1:], array.dtype, limit=limit, huge=False)
            for kind, array in self.arrays.items()
        }
        self._logged = 0
        self._notes = notes
        self._error: InsituError | None = None
        notes.begin(self.count)

    def keep(self, rows: NDArray[Any]) -> None:
        """These rows, by number and distinct, are about to be changed. Where there is no room to keep them,
        the reader hears of it."""
        if self._error is not None:
            return
        new = self._notes.missing(rows[rows < self.count]).astype(np.int32, copy=False)
        if not new.size:
            return
        try:
            for kind in tuple(self._unread):
                log = self._log[kind]
                log.extend(self._logged + len(new) - log.rows)
                native.take(self.arrays[kind], new, log.array[self._logged : log.rows])
        except InsituError as error:
            self._error = error
            return
        self._logged += len(new)
        self._notes.add(new)

    def read(self, kind: str, low: int, high: int, out: Array) -> None:
        """Writes rows [low, high) of `kind`, as they were, to `out`. Raises CheckpointError where they are
        known no more."""
        np.copyto(out, self.arrays[kind][low:high])
        if self._error is not None:
            raise CheckpointError(f"No checkpoint could be written beside the training: {self._error}")
        which, where = self._notes.found(low, high)
        if which.size:
            out[which] = self._log[kind].array[where]

    def done(self, kind: str) -> None:
        """Nobody reads `kind` any more: its rows aren't kept from now on."""
        self._unread.pop(kind, None)


class SnapshotArray:
    """One kind of a moment's rows, with what is known of an array: to be read in blocks."""

    def __init__(self, moment: TableSnapshot, kind: str) -> None:
        like = moment.arrays[kind]
        self.shape, self.dtype, self.nbytes = like.shape, like.dtype, like.nbytes
        self._moment = moment
        self._kind = kind

    def read(self, low: int, high: int, out: Array) -> None:
        """Writes rows [low, high) to `out`. Once the last have been read, none can be read again."""
        self._moment.read(self._kind, low, high, out)
        if high == len(self):
            self._moment.done(self._kind)

    def __len__(self) -> int:
        return int(self.shape[0])
