"""Pure: the rows of a shard in each batch. They follow from (seed, epoch, shard)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.grid.layout.permutation import Permutation

Rows = npt.NDArray[np.int64]

_FINDER_BITS = 13
"""The table by which partitions are found has 2**13 entries at most, which stay in the processor's cache."""

MOST_SORTED = 1 << 26
"""Rows of a shard up to which a shuffle sorts them all. For more that would take seconds and gigabytes."""
_EXACT = 3
"""The purpose of the key of a permutation. Others are in `windows.py` and `sampling.py`."""


class Order(Protocol):
    """Positions of rows in the order in which they are used: an array, or what can be cut like one."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice, /) -> npt.NDArray[np.integer[Any]]: ...


def shuffled(rows: int, seed: int, epoch: int, shard: int) -> npt.NDArray[np.integer[Any]]:
    """Return a permutation of [0, rows): the positions of a shard's rows in the order of one epoch.

    Each row gets 64 raw bits of Philox4x64-10 (Salmon and others 2011) keyed by (seed, epoch, shard), whose
    low bits are then replaced by the row's place; sorted, they are the order. NumPy promises the raw bits of
    Philox for all releases, and the keys are distinct, so that neither a release nor a sorting algorithm can
    change the order. uint32 if that is enough, to halve the memory.
    """
    bits = max(1, (rows - 1).bit_length())
    mask = np.uint64((1 << bits) - 1)
    key = np.array([seed & (2**64 - 1), epoch << 32 | shard], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(rows)
    keys &= ~mask
    keys |= np.arange(rows, dtype=np.uint64)
    keys.sort()
    keys &= mask
    return keys.astype(np.uint32) if bits <= 32 else keys.astype(np.int64)


class PermutedOrder:
    """The positions of many rows in the order of one epoch, each computed when it is asked for.

    `order[start:stop]` is int64[stop - start]. The memory doesn't depend on the number of rows.
    """

    def __init__(self, rows: int, seed: int, epoch: int, shard: int) -> None:
        self._permutation = Permutation(rows, seed, epoch, shard, _EXACT)

    def __len__(self) -> int:
        return self._permutation.size

    def __getitem__(self, places: slice) -> Rows:
        return self._permutation.apply(np.arange(*places.indices(len(self))))


class ChosenOrder:
    """Some rows of a shard, in an order of them. `positions[order[i]]` is the position of the i-th one."""

    def __init__(self, positions: Rows, order: Order) -> None:
        self._positions = positions
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, places: slice) -> Rows:
        found: Rows = self._positions[self._order[places]]
        return found


def order_rows(rows: int, seed: int, epoch: int, shard: int) -> Order:
    """Return all of [0, rows) in the order of one epoch: `shuffled` of up to MOST_SORTED rows, of more a
    keyed permutation."""
    if rows <= MOST_SORTED:
        return shuffled(rows, seed, epoch, shard)
    return PermutedOrder(rows, seed, epoch, shard)


def batch_sizes(global_size: int, shards: int) -> tuple[int, ...]:
    """Return the rows of each shard in a step: equal parts, the first ones larger by one if needed.

    Raises InputError if a shard would get none.
    """
    if global_size < shards:
        raise InputError(
            f"The global batch must have at least one row per shard. Received: .batch({global_size}) with "
            f"{shards} shards"
        )
    return tuple(global_size // shards + (s < global_size % shards) for s in range(shards))


def steps_of_shard(rows: int, size: int) -> int:
    """Return how many batches of `size` rows hold `rows` rows, the last one maybe smaller."""
    return -(-rows // size)


class BatchPlan:
    """The batches of one shard, in file order.

    The shard's rows are those of its partitions in ascending order, each in file order. `starts[k]` is the
    position of the first row of the k-th partition, `starts[-1]` the number of all rows.
    """

    def __init__(self, starts: Sequence[int], size: int) -> None:
        self.size = size
        self.rows = starts[-1]
        self.steps = steps_of_shard(self.rows, size)
        self._starts = np.asarray(starts, dtype=np.int64)

    def ranges(self, step: int) -> list[tuple[int, int, int]]:
        """Return (k, first row, last row + 1) in the k-th partition for the batch of `step`, by k."""
        start, stop = step * self.size, min((step + 1) * self.size, self.rows)
        k = int(np.searchsorted(self._starts, start, side="right")) - 1
        found = []
        while start < stop:
            end = min(stop, int(self._starts[k + 1]))
            if end > start:
                base = int(self._starts[k])
                found.append((k, start - base, end - base))
            start, k = max(start, end), k + 1
        return found


class ShuffledPlan(BatchPlan):
    """The batches of one shard in one epoch, cut from `order`: positions of all its rows, or of some.

    The rows of each batch are grouped by partition (in ascending order, otherwise in the permutation's), so
    that each partition is read by one call.
    """

    WINDOW_ROWS = 1 << 15
    """Rows that are planned at once: enough to spread NumPy's cost per call."""

    def __init__(self, starts: Sequence[int], size: int, order: Order) -> None:
        super().__init__(starts, size)
        self.rows = len(order)
        self.steps = steps_of_shard(self.rows, size)
        self.window_steps = max(1, self.WINDOW_ROWS // size)
        self._order = order
        self._finder = _PartFinder(self._starts)
        #: For each row of a plan, the number of its batch times that of the partitions.
        self._first_cells = self._number_cells()
        #: The number of the plan that the following are of. Written by `_plan`, as they are.
        self._planned = -1
        #: For each batch (partition, its rows).
        self._batches: list[list[tuple[int, Rows]]] = []
        #: The positions of rows in the order of the batches, and the partition of each.
        self._positions: Rows = np.empty(0, np.int64)
        self._parts: Rows = np.empty(0, np.int64)
        #: The answer of `locate` for them; None: it wasn't asked yet.
        self._located: list[Rows] | None = None

    def _number_cells(self) -> npt.NDArray[np.integer[Any]]:
        parts = len(self._starts) - 1
        rows = min(self.window_steps * self.size, self.rows)
        narrow = np.uint16 if self.window_steps * parts <= 1 << 16 else np.int64
        return (np.arange(rows) // self.size * parts).astype(narrow)

    def rows_of_batch(self, step: int) -> list[tuple[int, Rows]]:
        """Return (k, rows of the k-th partition) for the batch of `step`, by k."""
        within = self._plan(step)
        return self._batches[within]

    def locate_batch(self, step: int, locate: Callable[[Rows, Rows, int], list[Rows]]) -> list[Rows]:
        """Return what `locate` gives for the positions of the batch of `step`, in the order of its rows.

        `locate` takes positions in the shard, the partition of each, and the place of the first one in the
        order, and returns arrays with an entry for each. It is called once for many batches, and must be the
        same function for all.
        """
        start = self._plan(step) * self.size
        if self._located is None:
            place = self._planned * self.window_steps * self.size
            self._located = locate(self._positions, self._parts, place)
        return [rows[start : start + self.size] for rows in self._located]

    def forget_places(self) -> None:
        """Ask `locate` again: rows are elsewhere now."""
        self._located = None

    def _plan(self, step: int) -> int:
        """Plan the batch of `step` with those around it; return its number among them."""
        window, within = divmod(step, self.window_steps)
        if self._planned != window:
            span = self.window_steps * self.size
            self._batches = self._group(self._order[window * span : (window + 1) * span])
            self._planned, self._located = window, None
        return within

    def _group(self, order: npt.NDArray[np.integer[Any]]) -> list[list[tuple[int, Rows]]]:
        """Return the rows of each batch by partition; `order` holds the positions of whole batches."""
        positions = order.astype(np.int64)
        parts = len(self._starts) - 1
        # NumPy sorts 16-bit keys by radix, several times faster than wider ones.
        cell = self._first_cells[: len(positions)] + self._finder.find(positions).astype(
            self._first_cells.dtype
        )
        grouped = np.argsort(cell, kind="stable")
        self._positions, cell = positions[grouped], cell[grouped]
        bounds = np.concatenate(([0], np.flatnonzero(cell[1:] != cell[:-1]) + 1, [len(cell)]))
        steps, of_cell = np.divmod(cell[bounds[:-1]].astype(np.int64), parts)
        self._parts = np.repeat(of_cell, np.diff(bounds))
        rows = self._positions - np.repeat(self._starts[of_cell], np.diff(bounds))
        batches: list[list[tuple[int, Rows]]] = [[] for _ in range(steps_of_shard(len(positions), self.size))]
        cells = zip(steps.tolist(), of_cell.tolist(), itertools.pairwise(bounds.tolist()), strict=True)
        for step, k, (start, stop) in cells:
            batches[step].append((k, rows[start:stop]))
        return batches


class _PartFinder:
    """Finds the partition of a row by its position in the shard, several times faster than a search."""

    def __init__(self, starts: Rows) -> None:
        self._starts = starts
        self._shift = max(0, int(starts[-1]).bit_length() - _FINDER_BITS)
        firsts = np.arange((int(starts[-1]) >> self._shift) + 1) << self._shift
        #: The partition of the first position of each piece of 2**shift positions.
        self._part_of_piece = np.searchsorted(starts, firsts, side="right") - 1
        ends = np.searchsorted(starts, firsts + (1 << self._shift) - 1, side="right") - 1
        # In a piece there is one beginning of a partition at most; else it has to be searched for.
        self._simple = bool((ends - self._part_of_piece <= 1).all())

    def find(self, positions: Rows) -> Rows:
        """Return the number of the partition of each position."""
        if not self._simple:
            return np.searchsorted(self._starts, positions, side="right") - 1
        parts: Rows = self._part_of_piece[positions >> self._shift]
        parts += positions >= self._starts[parts + 1]
        return parts
