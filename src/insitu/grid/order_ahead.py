"""Computes the order of the next epoch while this one is read: sorting many rows takes seconds."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future

from insitu.grid.layout import MOST_SORTED, Order, order_rows
from insitu.grid.reading_threads import ReadingThreads

LEAST_ROWS = 1 << 20
"""Fewer rows are sorted in some milliseconds, for which no thread is begun. More than MOST_SORTED aren't
sorted."""

_Key = tuple[int, int, int, int]


class OrdersAhead:
    """Orders of shards by (rows, seed, epoch, shard), see `order_rows`. May be used by several threads."""

    def __init__(self) -> None:
        self._threads = ReadingThreads(1)
        #: Orders that were asked for in advance, of the process that asked, and what becomes of each.
        self._prepared: dict[tuple[int, _Key], tuple[Future[None], list[Order]]] = {}
        self._lock = threading.Lock()

    def prepare(self, rows: int, seed: int, epoch: int, shard: int) -> None:
        """Begin to compute an order, unless that is quick. It is kept until `get` is called for it, or
        for another epoch of its shard."""
        key = (os.getpid(), (rows, seed, epoch, shard))
        with self._lock:
            if not LEAST_ROWS <= rows <= MOST_SORTED or key in self._prepared:
                return
            found: list[Order] = []
            future = self._threads.submit(lambda: found.append(order_rows(rows, seed, epoch, shard)))
            self._prepared[key] = (future, found)

    def get(self, rows: int, seed: int, epoch: int, shard: int) -> Order:
        """Return an order."""
        key = (os.getpid(), (rows, seed, epoch, shard))
        with self._lock:
            prepared = self._prepared.pop(key, None)
            for other in [other for other in self._prepared if other[1][3] == shard]:
                self._prepared.pop(other)[0].cancel()
        if prepared is None:
            return order_rows(rows, seed, epoch, shard)
        prepared[0].result()
        return prepared[1][0]
