"""Reads a shard window by window, each while the one before it is used, in threads of its own."""

from __future__ import annotations

import math
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.spec import Column
from insitu.grid.layout import Rows, ShuffledPlan, WindowBlocks, WindowOrder, count_blocks_before
from insitu.grid.partitions import (
    DIRECT_ALIGNMENT,
    BlockedValues,
    body_alignment,
    is_ragged,
    is_variable,
    ragged_rows,
    value_dtype,
)

_THREADS = 4
"""Reads under way at once. Fewer leave a disk idle that serves several at a time."""
_LARGE_PAGE = 2 << 20
_MOST_DIRECT_ALIGNMENT = 256 << 10
"""Blocks that could be read in place at multiples of more bytes only are copied once, which saves memory."""


class BlockSource(Protocol):
    """One partition, whose blocks are read one by one. See `BlockReader`."""

    @property
    def direct(self) -> bool: ...
    def size(self, block: int) -> int: ...
    def offset(self, block: int) -> int: ...
    def body_start(self, block: int) -> int: ...
    def column_starts(self, block: int) -> dict[str, int]: ...
    def read(
        self, block: int, memory: npt.NDArray[np.uint8], start: int, *, owns_pages: bool = False
    ) -> None: ...
    def texts(self, block: int, memory: npt.NDArray[np.uint8], name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The source of a shard's rows."""

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
        self._threads = ReadingThreads(_THREADS)
        #: Memory that nobody uses now.
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def submit(
        self,
        source: BlockSource,
        block: int,
        memory: npt.NDArray[np.uint8],
        start: int,
        *,
        owns_pages: bool = False,
    ) -> Future[None]:
        """Begin to read a block into `memory`, from byte `start` on. See `BlockReader.read`."""
        return self._threads.submit(partial(source.read, owns_pages=owns_pages), block, memory, start)

    def take_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` bytes or more, which may have been used before. They begin at a page."""
        with self._lock:
            fitting = [number for number, free in enumerate(self._free) if len(free) >= size]
            if fitting:
                return self._free.pop(fitting[0])
            self._free.clear()
        pages = mmap.mmap(-1, -(-max(1, size) // _LARGE_PAGE) * _LARGE_PAGE, _PRIVATE)
        # Rows are taken from all over it: with small pages, most of them miss the table of addresses.
        pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)

    def give_back(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let `memory` be used again. Nobody may read it any more."""
        with self._lock:
            self._free.append(memory)


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Window:
    """The blocks of one window, in memory or on their way there."""

    def __init__(self, shard: ShardSource, held: WindowBlocks, ahead: ReadAhead) -> None:
        self._shard = shard
        self._held = held
        self._ahead = ahead
        self._sources = [
            (shard.partitions[part], block)
            for part, block in zip(held.parts.tolist(), held.blocks.tolist(), strict=True)
        ]
        self._rows_before = np.cumsum(held.rows) - held.rows
        alignment = body_alignment(shard.all_columns)
        joint = math.lcm(alignment, DIRECT_ALIGNMENT)
        #: Whether each block has the pages that it touches for itself, so that it can be read in place.
        self._owns_pages = self._sources[0][0].direct and joint <= _MOST_DIRECT_ALIGNMENT
        step, page = (joint, DIRECT_ALIGNMENT) if self._owns_pages else (alignment, 1)
        self._starts, size = self._arrange(alignment, step, page)
        self._memory = ahead.take_memory(size)
        self._values: dict[str, Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._reads = [
            self._ahead.submit(source, block, self._memory, start, owns_pages=self._owns_pages)
            for (source, block), start in zip(self._sources, self._starts, strict=True)
        ]

    def _arrange(self, alignment: int, step: int, page: int) -> tuple[list[int], int]:
        """Return the offset of each block in memory, and the bytes of all.

        Bodies are a multiple of the alignment apart, which makes rows of all blocks one array. If blocks own
        their pages, each also begins as many bytes after a page as in its file.
        """
        starts: list[int] = []
        end = 0
        for source, block in self._sources:
            body = source.body_start(block)
            # The body's place in memory modulo `step` is that in the file, seen from the first one's.
            before = source.offset(block) + body
            if not starts:
                base = before % alignment
            wanted = before % step if (before - base) % alignment == 0 else base
            earliest = -(-end // page) * page + (source.offset(block) % page) + body
            start = earliest + (wanted - earliest) % step - body
            starts.append(start)
            end = start + source.size(block)
        return starts, end + page

    def take(self, blocks: Rows, rows: Rows) -> list[npt.NDArray[Any]]:
        """Return the columns of some rows, by block of the window and row in it, once they have been read.

        Raises CorruptPartition.
        """
        if self._values is None:
            if self._process != os.getpid():
                self._begin()  # the threads stayed in the process from which this one was forked
            for read in self._reads:
                read.result()
            columns = self._shard.columns
            # Once for all columns, of which there may be thousands.
            starts = [source.column_starts(block) for source, block in self._sources]
            self._values = {column.name: self._collect(column, starts) for column in columns}
        arrays = []
        for column in self._shard.columns:
            values = self._values[column.name]
            if is_variable(column):
                found = values.take(pa.array(self._rows_before[blocks] + rows))
                if is_ragged(column):
                    arrays.append(ragged_rows(found, value_dtype(column)))
                else:
                    arrays.append(found.to_numpy(zero_copy_only=False))
            else:
                out = np.empty((len(rows), *column.shape), column.dtype)
                values.take_of_blocks(blocks, rows, out)
                arrays.append(out)
        return arrays

    def _collect(self, column: Column, column_starts: Sequence[dict[str, int]]) -> Any:
        blocks = list(zip(self._sources, self._starts, strict=True))
        if is_variable(column):
            return pa.concat_arrays(
                [
                    source.texts(block, self._memory[start : start + source.size(block)], column.name)
                    for (source, block), start in blocks
                ]
            )
        starts = [start + of[column.name] for start, of in zip(self._starts, column_starts, strict=True)]
        return BlockedValues(self._memory, column, self._shard.block_rows, np.array(starts))

    def release(self) -> None:
        """Give the memory back, once nothing is read into it any more. Waits for nothing."""
        self._values = None
        under_way = [read for read in self._reads if not read.cancel() and not read.done()]
        memory, ahead, self._reads = self._memory, self._ahead, []
        left = _Countdown(len(under_way) + 1, lambda: ahead.give_back(memory))
        for read in under_way:
            read.add_done_callback(left)
        left(None)


class _Countdown:
    """Calls `last` when it has been called `count` times itself, by any threads."""

    def __init__(self, count: int, last: Callable[[], None]) -> None:
        self._left = count
        self._last = last
        self._lock = threading.Lock()

    def __call__(self, ended: Future[None] | None) -> None:
        with self._lock:
            self._left -= 1
            done = not self._left
        if done:
            self._last()


_ROWS_AT_ONCE = 256


def read_rows(shard: ShardSource, rows: Rows, ahead: ReadAhead) -> list[npt.NDArray[Any]]:
    """Return the columns of rows of a shard with one partition, in their order; one row at least.

    Only their blocks are read. Raises CorruptPartition.
    """
    parts = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        blocks, within = np.divmod(some, shard.block_rows)
        numbers, of_row = np.unique(blocks, return_inverse=True)
        firsts = numbers * shard.block_rows
        counts = np.minimum(shard.block_rows, shard.starts[-1] - firsts)
        window = Window(shard, WindowBlocks(np.zeros_like(numbers), numbers, counts, firsts), ahead)
        parts.append(window.take(of_row, within))
        window.release()
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


class WindowedColumns:
    """The columns of a shard in the order of one epoch.

    Two windows are in memory: one is used, the next one is being read.
    """

    def __init__(self, shard: ShardSource, order: WindowOrder, ahead: ReadAhead) -> None:
        self.shard = shard
        self.order = order
        self.ahead = ahead
        self.at_last_window: Callable[[], None] | None = None
        """Called once, when there is no further window to read."""
        self._windows: dict[int, Window] = {}
        self._blocks_before = count_blocks_before(np.diff(shard.starts), shard.block_rows)

    def begin(self, window: int) -> None:
        """Begin to read a window, unless there is no such window, or it has begun."""
        if window < self.order.num_windows and window not in self._windows:
            held = self.order.blocks_of_window(window)
            self._windows[window] = Window(self.shard, held, self.ahead)
        elif window == self.order.num_windows and self.at_last_window is not None:
            call, self.at_last_window = self.at_last_window, None
            call()

    def _locate(self, positions: Rows, parts: Rows, place: int) -> list[Rows]:
        """Return (window, block in it, row in the block) for rows by their positions in the shard.

        They are those that come from `place` of the epoch on, in any order.
        """
        windows = range(self.order.window_of(place), self.order.window_of(place + len(positions) - 1) + 1)
        held = [self.order.blocks_of_window(window) for window in windows]
        numbers = np.concatenate([self._blocks_before[each.parts] + each.blocks for each in held])
        within = np.concatenate([np.arange(len(each.blocks)) for each in held])
        of_window = np.repeat(np.array(windows), [len(each.blocks) for each in held])
        by_number = np.argsort(numbers)
        positions = positions - self.shard.starts[parts]
        blocks = positions // self.shard.block_rows
        rows = positions - blocks * self.shard.block_rows
        found = by_number[np.searchsorted(numbers, self._blocks_before[parts] + blocks, sorter=by_number)]
        return [of_window[found], within[found], rows]

    def take_batch(self, plan: ShuffledPlan, step: int) -> list[npt.NDArray[Any]]:
        """Return the columns of the batch of `step`, in the order of its rows. Raises CorruptPartition."""
        of_window, blocks, rows = plan.locate_batch(step, self._locate)
        first = self.order.window_of(step * plan.size)
        last = self.order.window_of(step * plan.size + len(rows) - 1)
        for window in [window for window in self._windows if not first <= window <= last + 1]:
            self._windows.pop(window).release()
        # Never a third one: a batch in two windows waits for the next to be read until the first is done.
        for window in range(first, max(last, first + 1) + 1):
            self.begin(window)
        if first == last:
            return self._windows[first].take(blocks, rows)
        parts = []
        for window in range(first, last + 1):
            here = np.flatnonzero(of_window == window)
            parts.append((here, self._windows[window].take(blocks[here], rows[here])))
        order = np.argsort(np.concatenate([here for here, _ in parts]), kind="stable")
        return [
            np.concatenate(arrays)[order] for arrays in zip(*(arrays for _, arrays in parts), strict=True)
        ]

    def close(self) -> None:
        """End all reads and give the memory back."""
        while self._windows:
            self._windows.popitem()[1].release()


# Threads that read. Nothing waits for their end: a disk that hangs keeps no process from exiting


_Calls = queue.SimpleQueue[tuple[Future[None], Callable[..., None], tuple[Any, ...]] | None]


class ReadingThreads:
    """Daemon threads that run calls in the order in which they were submitted.

    They begin with the first call, in a forked process again, and end when this object is gone.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        #: The process whose threads take from `_calls`; 0: none has begun.
        self._process = 0
        #: Calls that no thread has taken yet. Replaced in a forked process.
        self._calls: _Calls = queue.SimpleQueue()
        self._beginning = threading.Lock()

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run `call(*arguments)` in a thread. Errors that it raises are raised by `result` of the future."""
        if self._process != os.getpid():
            self._begin()
        future: Future[None] = Future()
        self._calls.put((future, call, arguments))
        return future

    def _begin(self) -> None:
        with self._beginning:
            if self._process == os.getpid():
                return
            self._calls = queue.SimpleQueue()
            for number in range(self._count):
                thread = threading.Thread(
                    target=_run, args=(self._calls,), name=f"insitu-read-ahead-{number}", daemon=True
                )
                thread.start()
            ending: Any = weakref.finalize(self, _end, self._calls, self._count)
            ending.atexit = False
            self._process = os.getpid()


def _end(calls: _Calls, count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _run(calls: _Calls) -> None:
    while (taken := calls.get()) is not None:
        future, call, arguments = taken
        if future.set_running_or_notify_cancel():
            try:
                call(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        # Not kept until the next call: they hold the memory of a window.
        del taken, future, call, arguments
