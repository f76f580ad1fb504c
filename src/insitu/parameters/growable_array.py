"""An array that grows at its end without being copied: a reservation of addresses, filled by the kernel page
by page as rows are first touched. What is reserved and not touched costs nothing."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ExchangeError, ParameterError
from insitu.exchange import pages


def physical_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class GrowableArray:
    """Rows of `shape`, of one dtype; `rows` of them are in use. `array` is all that may be used, at an
    address that never changes unless the system refuses to reserve as much as the machine has.

    New rows are zero only where they were never used before.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, limit: int | None = None, huge: bool = True
    ) -> None:
        """`limit` bytes may be used at most (None: the machine's memory); in large pages of memory where they
        are `huge`."""
        self._huge = huge
        self._shape = shape
        self._dtype = dtype
        self._row_bytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        self._most = max(1, (physical_bytes() if limit is None else limit) // self._row_bytes)
        self.rows = 0
        self.array: NDArray[Any] = self._reserve(self._most)

    def _reserve(self, rows: int) -> NDArray[Any]:
        while True:
            try:
                whole = pages.Pages(rows * self._row_bytes, huge=self._huge).array()
                return whole[: rows * self._row_bytes].view(self._dtype).reshape(rows, *self._shape)
            except ExchangeError:
                # Where the system counts reservations (overcommit off), it grows by copying.
                if rows <= 1024:
                    raise
                rows //= 2

    def extend(self, count: int) -> int:
        """Brings `count` more rows into use; returns the number of the first. Raises ParameterError where
        the machine has no room for them."""
        first, needed = self.rows, self.rows + count
        if needed > self._most:
            raise ParameterError(
                f"{needed:,} rows of {self._row_bytes} bytes don't fit in this machine's memory; spread the "
                "table over more servers (--ps), or let rows be evicted"
            )
        if needed > len(self.array):
            larger = self._reserve(min(self._most, max(needed, 2 * len(self.array))))
            if len(larger) < needed:
                raise ParameterError(f"The system has no memory for {needed:,} rows of a table")
            larger[:first] = self.array[:first]
            self.array = larger
        self.rows = needed
        return first

    def shrink(self, rows: int) -> None:
        """Gives up all rows from `rows` on. Their memory is used again by the next."""
        self.rows = rows
