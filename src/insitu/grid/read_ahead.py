"""Reads a shard window by window, each while the one before it is used, in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.grid.layout import Rows, ShuffledPlan, WindowBlocks, WindowedOrder, count_blocks_before
from insitu.grid.partitions import TEXT, BlockedValues, body_alignment
from insitu.spec import Column

_THREADS = 4
"""Reads under way at once. Fewer leave a disk idle that serves several at a time."""


class BlockSource(Protocol):
    """One partition, whose blocks are read one by one. See `BlockReader`."""

    def size(self, block: int) -> int: ...
    def body_start(self, block: int) -> int: ...
    def column_starts(self, block: int) -> dict[str, int]: ...
    def read(self, block: int, memory: npt.NDArray[np.uint8]) -> None: ...
    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class ShardSource:
    """What a shard is read from."""

    #: The shard's partitions, in their order.
    partitions: Sequence[BlockSource]
    #: The position of each partition's first row in the shard; at the end, all rows.
    starts: Rows
    #: Rows of each block of a partition but its last.
    block_rows: int
    #: All columns of the cache.
    all_columns: tuple[Column, ...]
    #: The columns that are read.
    columns: Sequence[Column]


class ReadAhead:
    """The threads and the memory in which windows are read. Shared by all shards of a process."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="insitu-read-ahead")
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def submit(self, source: BlockSource, block: int, memory: npt.NDArray[np.uint8]) -> Future[None]:
        """Begin to read a block into `memory`."""
        return self._executor.submit(source.read, block, memory)

    def take_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` bytes or more, which may have been used before."""
        with self._lock:
            fitting = [number for number, free in enumerate(self._free) if len(free) >= size]
            if fitting:
                return self._free.pop(fitting[0])
            self._free.clear()
        return np.empty(size, np.uint8)

    def give_back(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let `memory` be used again. Nobody may read it any more."""
        with self._lock:
            self._free.append(memory)


class Window:
    """The blocks of one window, in memory or on their way there."""

    def __init__(self, shard: ShardSource, held: WindowBlocks, ahead: ReadAhead) -> None:
        self._shard = shard
        self._held = held
        self._ahead = ahead
        self._blocks_before = count_blocks_before(np.diff(shard.starts), shard.block_rows)
        self._numbers = self._blocks_before[held.parts] + held.blocks
        self._rows_before = np.cumsum(held.rows) - held.rows
        self._places = self._arrange()
        self._memory = ahead.take_memory(self._places[-1][1])
        self._reads = [
            ahead.submit(source, block, self._memory[start:stop])
            for (source, block), (start, stop) in zip(self._sources(), self._places, strict=True)
        ]
        self._values: dict[str, Any] | None = None

    def _sources(self) -> list[tuple[BlockSource, int]]:
        held = self._held
        return [
            (self._shard.partitions[part], block)
            for part, block in zip(held.parts.tolist(), held.blocks.tolist(), strict=True)
        ]

    def _arrange(self) -> list[tuple[int, int]]:
        """Return where in memory each block lies, so that bodies are a multiple of the alignment apart."""
        alignment, places, end = body_alignment(self._shard.all_columns), [], 0
        for source, block in self._sources():
            body = source.body_start(block)
            start = -(-(end + body) // alignment) * alignment - body
            end = start + source.size(block)
            places.append((start, end))
        return places

    def find(self, positions: Rows) -> tuple[Rows, Rows]:
        """Return (block in the window, row in the block) of rows by their positions in the shard.

        The block is -1 for rows that are elsewhere.
        """
        starts = self._shard.starts
        parts = np.searchsorted(starts, positions, side="right") - 1
        blocks, rows = np.divmod(positions - starts[parts], self._shard.block_rows)
        numbers = self._blocks_before[parts] + blocks
        found = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return np.where(self._numbers[found] == numbers, found, -1), rows

    def take(self, blocks: Rows, rows: Rows) -> list[npt.NDArray[Any]]:
        """Return the columns of some rows, once they have been read. Raises CorruptPartition."""
        if self._values is None:
            for read in self._reads:
                read.result()
            self._values = {column.name: self._collect(column) for column in self._shard.columns}
        arrays = []
        for column in self._shard.columns:
            values = self._values[column.name]
            if column.dtype == TEXT:
                wanted = pa.array(self._rows_before[blocks] + rows)
                arrays.append(values.take(wanted).to_numpy(zero_copy_only=False))
            else:
                out = np.empty((len(rows), *column.shape), column.dtype)
                values.take(blocks * self._shard.block_rows + rows, out)
                arrays.append(out)
        return arrays

    def _collect(self, column: Column) -> Any:
        blocks = list(zip(self._sources(), self._places, strict=True))
        if column.dtype == TEXT:
            return pa.concat_arrays(
                [source.texts(block, self._memory[a:b], column.name) for (source, block), (a, b) in blocks]
            )
        starts = [a + source.column_starts(block)[column.name] for (source, block), (a, _) in blocks]
        return BlockedValues(self._memory, column, self._shard.block_rows, np.array(starts))

    def release(self) -> None:
        """Give the memory back, once nothing is read into it any more."""
        for read in self._reads:
            read.cancel()
        for read in self._reads:
            if not read.cancelled():
                read.exception()
        self._values = None
        self._ahead.give_back(self._memory)


class WindowedColumns:
    """The columns of a shard in the order of one epoch.

    Two windows are in memory: one is used, the next one is being read.
    """

    def __init__(self, shard: ShardSource, order: WindowedOrder, ahead: ReadAhead) -> None:
        self.shard = shard
        self.order = order
        self.ahead = ahead
        self.at_last_window: Callable[[], None] | None = None
        """Called once, when there is no further window to read."""
        self._windows: dict[int, Window] = {}

    def begin(self, window: int) -> None:
        """Begin to read a window, unless there is no such window, or it has begun."""
        if window < self.order.num_windows and window not in self._windows:
            held = self.order.blocks_of_window(window)
            self._windows[window] = Window(self.shard, held, self.ahead)
        elif window == self.order.num_windows and self.at_last_window is not None:
            call, self.at_last_window = self.at_last_window, None
            call()

    def take_batch(self, plan: ShuffledPlan, step: int) -> list[npt.NDArray[Any]]:
        """Return the columns of the batch of `step`, in the order of its rows. Raises CorruptPartition."""
        (positions,) = plan.locate_batch(step, lambda rows: [rows])
        first = self.order.window_of(step * plan.size)
        last = self.order.window_of(step * plan.size + len(positions) - 1)
        for window in [window for window in self._windows if not first <= window <= last + 1]:
            self._windows.pop(window).release()
        parts = []
        for window in range(first, last + 1):
            self.begin(window)
            self.begin(window + 1)
            blocks, rows = self._windows[window].find(positions)
            here = np.flatnonzero(blocks >= 0)
            parts.append((here, self._windows[window].take(blocks[here], rows[here])))
        if len(parts) == 1:
            return parts[0][1]
        order = np.argsort(np.concatenate([here for here, _ in parts]), kind="stable")
        return [
            np.concatenate(arrays)[order] for arrays in zip(*(arrays for _, arrays in parts), strict=True)
        ]

    def close(self) -> None:
        """End all reads and give the memory back."""
        while self._windows:
            self._windows.popitem()[1].release()
