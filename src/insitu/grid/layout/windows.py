"""Pure: the order of a shard that is too large to be shuffled as a whole."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from insitu.grid.layout.order import Rows, shuffled
from insitu.grid.layout.permutation import Permutation

_BLOCKS, _ROWS = 0, 1
"""The purpose of a key: the order of the blocks, or of the rows in a window."""


def count_blocks_before(part_rows: npt.NDArray[np.int64], block_rows: int) -> npt.NDArray[np.int64]:
    """Return the number of blocks in the shard before each partition, and at the end that of all blocks."""
    return np.concatenate(([0], np.cumsum(-(-part_rows // block_rows)))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of one window, in the order of the shard."""

    #: int64[n]: `parts[i]` is the partition of block i, counted in the shard.
    parts: npt.NDArray[np.int64]
    #: int64[n]: the number of block i in its partition.
    blocks: npt.NDArray[np.int64]
    #: int64[n]: rows of block i.
    rows: npt.NDArray[np.int64]
    #: int64[n]: the first row of block i in its partition.
    firsts: npt.NDArray[np.int64]


class WindowOrder(Protocol):
    """An order of a shard's rows whose windows are read one after the other. See `WindowedOrder`."""

    @property
    def num_windows(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, positions: slice, /) -> npt.NDArray[np.int64]: ...
    def window_of(self, place: int) -> int: ...
    def blocks_of_window(self, window: int) -> WindowBlocks: ...


class WindowedOrder:
    """The positions of a shard's rows in the order of one epoch.

    `order[start:stop]` is int64[stop - start].

    Blocks of `block_rows` consecutive rows come in a random order. Each `window_blocks` of them in a row are
    a window, and all rows of a window are mixed. So one window is read ahead while another one is trained
    on, and nothing is read twice. Each partition's last block may be smaller. The order follows from its
    arguments alone, and can be entered anywhere.
    """

    def __init__(
        self,
        starts: Sequence[int],
        block_rows: int,
        window_blocks: int,
        *,
        seed: int,
        epoch: int,
        shard: int,
    ) -> None:
        """`starts[k]` is the position of the first row of the k-th partition, `starts[-1]` all rows."""
        self._starts = np.asarray(starts, dtype=np.int64)
        self._block_rows = block_rows
        self._window_blocks = window_blocks
        self._key = (seed, epoch, shard)
        part_rows = np.diff(self._starts)
        self._first_blocks = count_blocks_before(part_rows, block_rows)
        blocks = int(self._first_blocks[-1])
        self._order = Permutation(blocks, *self._key, _BLOCKS)
        self.num_windows = -(-blocks // window_blocks)
        self._window_starts = self._count_rows_before(blocks, part_rows)
        self._window_list: list[int] = self._window_starts.tolist()
        self._planned: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WindowedOrder) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]

    def _identity(self) -> tuple[object, ...]:
        return (self._key, self._block_rows, self._window_blocks, tuple(self._starts.tolist()))

    def _count_rows_before(self, blocks: int, part_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows before each window, and at the end all rows. Only last blocks can be short."""
        bounds = np.minimum(np.arange(self.num_windows + 1) * self._window_blocks, blocks)
        missing = -part_rows % self._block_rows
        short = np.flatnonzero(missing)
        places = self._order.invert(self._first_blocks[short + 1] - 1)
        by_place = np.argsort(places)
        missing_before = np.concatenate(([0], np.cumsum(missing[short][by_place])))
        return bounds * self._block_rows - missing_before[np.searchsorted(places[by_place], bounds)]

    def __getitem__(self, positions: slice) -> npt.NDArray[np.int64]:
        start, stop, _ = positions.indices(int(self._starts[-1]))
        found = []
        while start < stop:
            window = self.window_of(start)
            first, end = self._window_starts[window : window + 2].tolist()
            found.append(self._rows_of_window(window)[start - first : min(stop, end) - first])
            start = min(stop, end)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def window_of(self, place: int) -> int:
        """Return the window of the row that comes at `place` of the epoch."""
        return bisect_right(self._window_list, place) - 1

    def blocks_of_window(self, window: int) -> WindowBlocks:
        """Return the blocks of a window in [0, num_windows)."""
        first = window * self._window_blocks
        stop = min(first + self._window_blocks, self._order.size)
        numbers = np.sort(self._order.apply(np.arange(first, stop)))
        return _find_blocks(numbers, self._first_blocks, self._starts, self._block_rows)

    def _rows_of_window(self, window: int) -> npt.NDArray[np.int64]:
        if self._planned[0] != window:
            held = self.blocks_of_window(window)
            firsts = self._starts[held.parts] + held.firsts
            # The i-th row of the window is the i-th of these, written one after another.
            ends = np.cumsum(held.rows)
            positions = np.arange(int(ends[-1])) + np.repeat(firsts - (ends - held.rows), held.rows)
            seed, epoch, shard = self._key
            mixed = shuffled(len(positions), _window_seed(seed, shard, window), epoch, _ROWS)
            self._planned = (window, positions[mixed])
        return self._planned[1]


class FileOrder:
    """The rows of a shard as stored, in windows of as many blocks in a row. See `WindowedOrder`."""

    def __init__(self, starts: Sequence[int], block_rows: int, window_blocks: int) -> None:
        """`starts[k]` is the position of the first row of the k-th partition, `starts[-1]` all rows."""
        self._starts = np.asarray(starts, dtype=np.int64)
        self._block_rows = block_rows
        self._window_blocks = window_blocks
        self._first_blocks = count_blocks_before(np.diff(self._starts), block_rows)
        self.num_windows = -(-int(self._first_blocks[-1]) // window_blocks)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileOrder) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]

    def _identity(self) -> tuple[object, ...]:
        return (self._block_rows, self._window_blocks, tuple(self._starts.tolist()))

    def __getitem__(self, positions: slice) -> npt.NDArray[np.int64]:
        start, stop, _ = positions.indices(len(self))
        return np.arange(start, stop)

    def window_of(self, place: int) -> int:
        """Return the window of the row at `place`."""
        part = int(np.searchsorted(self._starts, place, side="right")) - 1
        block = int(self._first_blocks[part]) + (place - int(self._starts[part])) // self._block_rows
        return block // self._window_blocks

    def blocks_of_window(self, window: int) -> WindowBlocks:
        """Return the blocks of a window in [0, num_windows)."""
        first = window * self._window_blocks
        stop = min(first + self._window_blocks, int(self._first_blocks[-1]))
        return _find_blocks(np.arange(first, stop), self._first_blocks, self._starts, self._block_rows)


def rows_before(order: WindowOrder, starts: Sequence[int], stop: int) -> Iterator[tuple[int, Rows]]:
    """Yield (k, ascending rows of the k-th partition) for the rows that come before place `stop` of an epoch.

    For whole windows before it, only the blocks are looked at. So this takes a window's memory and tens of
    milliseconds for a million rows, however many there are.
    """
    place = 0
    for window in range(order.num_windows):
        if place >= stop:
            return
        held = order.blocks_of_window(window)
        end = place + int(held.rows.sum())
        if end <= stop:
            ends = np.cumsum(held.rows)
            firsts = np.asarray(starts)[held.parts] + held.firsts
            positions = np.arange(int(ends[-1])) + np.repeat(firsts - (ends - held.rows), held.rows)
        else:
            positions = np.sort(order[place:stop])
        bounds = np.searchsorted(positions, starts).tolist()
        for k, (first, last) in enumerate(itertools.pairwise(bounds)):
            if last > first:
                yield k, positions[first:last] - starts[k]
        place = end


def _find_blocks(
    numbers: npt.NDArray[np.int64],
    first_blocks: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    block_rows: int,
) -> WindowBlocks:
    """Return blocks by their ascending numbers in the shard."""
    parts = np.searchsorted(first_blocks, numbers, side="right") - 1
    blocks = numbers - first_blocks[parts]
    part_rows = starts[parts + 1] - starts[parts]
    firsts = blocks * block_rows
    return WindowBlocks(parts, blocks, np.minimum(block_rows, part_rows - firsts), firsts)


def _window_seed(seed: int, shard: int, window: int) -> int:
    """Return a seed of 64 bits for the rows of one window."""
    return int(Permutation(1 << 62, seed, shard, _ROWS).apply(np.array([window]))[0])
