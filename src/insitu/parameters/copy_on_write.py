"""Reads the rows of a table as they were at one moment, while the table keeps changing: for a checkpoint.

Nothing is copied when the snapshot begins. The thread that is about to change rows first saves them: it
appends each of them once to a log and records its place. The thread that reads copies a block of the table as
it is, and only then looks which of its rows have been saved meanwhile or before. It takes these from the log.
As each row is saved before it changes, every row that had changed when it was copied is found in the log.

So neither thread waits for the other. This relies on one thread seeing another's writes in their order, as
processors of the x86 kind have it, and others by the locks that Python takes between the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import CheckpointError, InsituError
from insitu.parameters import native
from insitu.parameters.growable_array import GrowableArray

Array = NDArray[Any]
_MAX_NUMBER = 2**32 - 1


class SavedRowIndex:
    """For each row of a table, its position in the log of the present snapshot.

    A row's entry is its number in the log, counted from 1 over all snapshots; an entry that isn't above
    `_base` is of an older snapshot. So a new snapshot needn't clear the entries, and their memory, which was
    written to before, is used again.
    """

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: most bytes to use (None: the machine's memory)."""
        self._numbers = GrowableArray((), np.dtype(np.uint32), limit=limit, huge=False)
        #: Last number of older snapshots.
        self._base = 0
        #: Last number given.
        self._last = 0

    def begin(self, count: int) -> None:
        """Begin a new snapshot, of a table of `count` rows, none of which is saved."""
        self._numbers.extend(max(0, count - self._numbers.rows))
        if self._last + count >= _MAX_NUMBER:
            self._numbers.array[: self._numbers.rows] = 0
            self._last = 0
        self._base = self._last

    def find_unsaved(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return those of `rows` that aren't saved."""
        unsaved: NDArray[Any] = rows[self._numbers.array[rows] <= self._base]
        return unsaved

    def record(self, rows: NDArray[Any]) -> None:
        """Record that these rows were appended to the log, in order."""
        first = self._last + 1
        self._last += len(rows)
        self._numbers.array[rows] = np.arange(first, self._last + 1, dtype=np.uint32)

    def find_saved(self, low: int, high: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return (the rows of [low, high) that are saved, counted from `low`; their positions in the log)."""
        numbers = self._numbers.array[low:high]
        which = np.flatnonzero(numbers > self._base)
        return which, numbers[which].astype(np.intp) - self._base - 1


class TableSnapshot:
    """All rows of a table at one moment. One thread saves rows, another one reads."""

    def __init__(
        self, arrays: Mapping[str, Array], saved_rows: SavedRowIndex, limit: int | None = None
    ) -> None:
        """`limit`: most bytes to use for each kind of the log (None: the machine's memory)."""
        #: The table's own arrays by kind: keys, values, slots.
        self.arrays = dict(arrays)
        #: Rows of the table when the snapshot began.
        self.count = len(next(iter(self.arrays.values())))
        #: Kinds that aren't read to the end; the reader removes them.
        self._unread = dict.fromkeys(self.arrays)
        #: Saved rows by kind.
        self._log = {
            kind: GrowableArray(array.shape[1:], array.dtype, limit=limit, huge=False)
            for kind, array in self.arrays.items()
        }
        self._logged = 0
        self._saved_rows = saved_rows
        #: Why rows couldn't be saved, for the reader.
        self._error: InsituError | None = None
        saved_rows.begin(self.count)

    def save(self, rows: NDArray[Any]) -> None:
        """Save rows that are about to change, by number and distinct.

        If the log has no room for them, the reader fails and the table keeps changing.
        """
        if self._error is not None:
            return
        unsaved = self._saved_rows.find_unsaved(rows[rows < self.count]).astype(np.int32, copy=False)
        if not unsaved.size:
            return
        try:
            for kind in tuple(self._unread):
                log = self._log[kind]
                log.extend(self._logged + len(unsaved) - log.rows)
                native.take(self.arrays[kind], unsaved, log.array[self._logged : log.rows])
        except InsituError as error:
            self._error = error
            return
        self._logged += len(unsaved)
        self._saved_rows.record(unsaved)

    def read(self, kind: str, low: int, high: int, out: Array) -> None:
        """Write rows [low, high) of `kind`, as they were, to `out`.

        Raises CheckpointError if some couldn't be saved.
        """
        np.copyto(out, self.arrays[kind][low:high])
        if self._error is not None:
            raise CheckpointError(
                f"A checkpoint needs memory for rows that change while it is written: {self._error}"
            )
        which, positions = self._saved_rows.find_saved(low, high)
        if which.size:
            out[which] = self._log[kind].array[positions]

    def finish_reading(self, kind: str) -> None:
        """Stop saving rows of `kind`, which nobody reads any more."""
        self._unread.pop(kind, None)


class SnapshotArray:
    """One kind of a snapshot's rows, as an array that is read in blocks from its start to its end."""

    def __init__(self, snapshot: TableSnapshot, kind: str) -> None:
        like = snapshot.arrays[kind]
        self.shape, self.dtype, self.nbytes = like.shape, like.dtype, like.nbytes
        self._snapshot = snapshot
        self._kind = kind

    def read(self, low: int, high: int, out: Array) -> None:
        """Write rows [low, high) to `out`. Once the last row is read, none can be read again."""
        self._snapshot.read(self._kind, low, high, out)
        if high == len(self):
            self._snapshot.finish_reading(self._kind)

    def __len__(self) -> int:
        return int(self.shape[0])
