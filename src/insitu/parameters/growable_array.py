"""An array that grows at its end without being copied.

It reserves a range of addresses, which the kernel fills with memory page by page as rows are first written.
Reserved addresses that aren't used cost nothing.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import ExchangeError, ParameterError
from insitu.exchange import Pages

_MIN_RESERVED_ROWS = 1024


def total_memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class GrowableArray:
    """Rows of one shape and dtype. New rows are zero only in memory that no row used before."""

    #: Rows in use.
    rows: int
    #: All reserved rows, those in use first. Its address changes only if the system refuses to reserve as
    #: much as the machine has.
    array: NDArray[Any]

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, limit: int | None = None, huge: bool = True
    ) -> None:
        """`shape`: of one row. `limit`: most bytes to use (None: the machine's memory). `huge`: ask for large
        pages of memory."""
        self._huge = huge
        self._shape = shape
        self._dtype = dtype
        self._row_bytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        self._max_rows = max(1, (total_memory_bytes() if limit is None else limit) // self._row_bytes)
        self.rows = 0
        self.array = self._reserve(self._max_rows)

    def _reserve(self, rows: int) -> NDArray[Any]:
        while True:
            try:
                whole = Pages(rows * self._row_bytes, huge=self._huge).array()
                return whole[: rows * self._row_bytes].view(self._dtype).reshape(rows, *self._shape)
            except ExchangeError:
                # If the system counts reservations (overcommit off), reserve less; `extend` copies then.
                if rows <= _MIN_RESERVED_ROWS:
                    raise
                rows //= 2

    def extend(self, count: int) -> int:
        """Use `count` more rows. Return the number of the first. Raises ParameterError if they don't fit into
        the machine's memory."""
        first, needed = self.rows, self.rows + count
        if needed > self._max_rows:
            raise ParameterError(
                f"{needed:,} rows of {self._row_bytes} bytes don't fit in this machine's memory; spread the "
                "table over more servers (--ps), or let rows be evicted"
            )
        if needed > len(self.array):
            larger = self._reserve(min(self._max_rows, max(needed, 2 * len(self.array))))
            if len(larger) < needed:
                raise ParameterError(
                    f"The system grants no memory for {needed:,} rows of a table. Allow overcommit "
                    "(vm.overcommit_memory=0), or spread the table over more servers (--ps)"
                )
            larger[:first] = self.array[:first]
            self.array = larger
        self.rows = needed
        return first

    def truncate(self, rows: int) -> None:
        """Stop using all rows from `rows` on. Their memory is used again by the next `extend`."""
        self.rows = rows
