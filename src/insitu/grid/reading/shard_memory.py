"""The columns of a compressed shard that is used as a whole: each block is decompressed at its first use."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import GridError
from insitu.base.spec import Column
from insitu.grid.layout import FileOrder, Rows, ShuffledPlan, count_blocks_before
from insitu.grid.partitions import (
    BlockedValues,
    body_alignment,
    column_offsets,
    is_ragged,
    is_variable,
    ragged_rows,
    value_dtype,
)
from insitu.grid.reading.read_ahead import ReadAhead, ShardSource

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""With MAP_NORESERVE: blocks that aren't used take no memory."""


class ShardMemory:
    """Chosen columns of a shard, by the position of a row in it. Blocks stay in memory once they are used."""

    def __init__(self, shard: ShardSource, ahead: ReadAhead, limit: int, *, few: bool = False) -> None:
        """`limit` are the bytes that blocks may take. `few`: most of them won't be used."""
        self._shard = shard
        self._ahead = ahead
        self._limit = limit
        self._columns = shard.columns
        part_rows = np.diff(shard.starts)
        self._first_blocks = count_blocks_before(part_rows, shard.block_rows)
        self._shifts = self._first_blocks * shard.block_rows - shard.starts
        count = int(self._first_blocks[-1])
        held = FileOrder(shard.starts.tolist(), shard.block_rows, max(1, count)).blocks_of_window(0)
        self._sources = [
            (shard.partitions[part], block)
            for part, block in zip(held.parts.tolist(), held.blocks.tolist(), strict=True)
        ]
        self._short = np.flatnonzero(held.rows < shard.block_rows).tolist()
        sizes = np.array([source.size(block) for source, block in self._sources], dtype=np.int64)
        alignment = body_alignment(shard.all_columns)
        room = -(-sizes // alignment) * alignment
        #: The byte of memory at which each block begins, and the bytes that it takes.
        self._starts, self._sizes = np.cumsum(room) - room, sizes
        pages = mmap.mmap(-1, max(1, int(room.sum())), _FLAGS)
        if not few:  # else the blocks around the few that are used would take memory, too
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(pages, np.uint8)
        #: Whether each block is in memory. Two threads may both read one: they write the same bytes.
        self._ready = np.zeros(count, dtype=bool)
        self._fixed = {c.name: self._view(c) for c in self._columns if not is_variable(c)}
        #: The texts and lists of each block that was asked for, by the column's name.
        self._texts: dict[str, dict[int, Any]] = {c.name: {} for c in self._columns if is_variable(c)}
        #: Those of all blocks, once all are in memory.
        self._whole_texts: dict[str, Any] = {}

    def _view(self, column: Column) -> BlockedValues:
        # All blocks but the last of each partition have as many rows, and so the same offsets.
        full = column_offsets(self._shard.all_columns, self._shard.block_rows)[column.name]
        starts = self._starts + full
        for number in self._short:
            source, block = self._sources[number]
            starts[number] = self._starts[number] + source.column_starts(block)[column.name]
        memory = self._memory.view()
        memory.flags.writeable = False
        return BlockedValues(memory, column, self._shard.block_rows, starts)

    def _fill(self, blocks: Rows) -> None:
        """Have the given blocks in memory. Raises CorruptPartition; GridError if they take too much."""
        if self._ready[blocks].all():
            return
        missing = np.unique(blocks[~self._ready[blocks]])
        used = int(self._sizes[self._ready].sum() + self._sizes[missing].sum())
        if used > self._limit:
            raise GridError(
                f"Rows of a compressed cache that are shuffled as a whole, or that filter and take leave, "
                f"must fit into half of the memory, decompressed. Received: {used} bytes, where "
                f"{self._limit} are half of it. Import the cache again without --compress, or shuffle all "
                f"rows with exact=False"
            )
        reads = []
        for number in missing.tolist():
            source, block = self._sources[number]
            reads.append(self._ahead.submit(source, block, self._memory, int(self._starts[number])))
        for read in reads:
            read.result()
        self._ready[missing] = True

    def _locate(self, positions: Rows, parts: Rows, place: int) -> list[Rows]:
        """Return (block, row in it) for rows by their positions in the shard, and the partition of each."""
        rows = positions + self._shifts[parts]
        blocks = rows // self._shard.block_rows
        return [blocks, rows - blocks * self._shard.block_rows]

    def take_batch(self, plan: ShuffledPlan, step: int) -> list[npt.NDArray[Any]]:
        """Return the columns of the batch of `step`, in the order of its rows. Raises CorruptPartition."""
        blocks, rows = plan.locate_batch(step, self._locate)
        return self._take(blocks, rows)

    def take_range(self, part: int, start: int, stop: int) -> list[npt.NDArray[Any]]:
        """Return the columns of rows [start, stop) of a partition, in place if they are in one block."""
        first = int(self._first_blocks[part]) * self._shard.block_rows
        rows = np.arange(first + start, first + stop)
        blocks = rows // self._shard.block_rows
        self._fill(blocks)
        if self._texts:
            return self._take(blocks, rows - blocks * self._shard.block_rows)
        return [self._fixed[column.name].slice(first + start, first + stop) for column in self._columns]

    def _take(self, blocks: Rows, rows: Rows) -> list[npt.NDArray[Any]]:
        self._fill(blocks)
        arrays = []
        for column in self._columns:
            out = np.empty((len(rows), *column.shape), object if is_variable(column) else column.dtype)
            if is_variable(column):
                self._take_texts(column, blocks, rows, out)
            else:
                self._fixed[column.name].take_of_blocks(blocks, rows, out)
            arrays.append(out)
        return arrays

    def _take_texts(self, column: Column, blocks: Rows, rows: Rows, out: npt.NDArray[Any]) -> None:
        name = column.name
        if name not in self._whole_texts and self._ready.all():
            parts = [self._texts_of(name, number) for number in range(len(self._ready))]
            self._whole_texts[name] = pa.concat_arrays(parts)
            self._texts[name].clear()
        if name in self._whole_texts:
            out[:] = _to_objects(column, self._whole_texts[name].take(pa.array(self._numbers(blocks, rows))))
            return
        for number in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == number)
            out[here] = _to_objects(column, self._texts_of(name, number).take(pa.array(rows[here])))

    def _numbers(self, blocks: Rows, rows: Rows) -> Rows:
        """Return the positions in the shard of rows, counted in their blocks."""
        parts = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        positions: Rows = blocks * self._shard.block_rows + rows - self._shifts[parts]
        return positions

    def _texts_of(self, name: str, number: int) -> Any:
        found = self._texts[name].get(number)
        if found is None:
            source, block = self._sources[number]
            start = int(self._starts[number])
            memory = self._memory[start : start + int(self._sizes[number])]
            found = self._texts[name][number] = source.texts(block, memory, name)
        return found


def _to_objects(column: Column, found: Any) -> npt.NDArray[Any]:
    if is_ragged(column):
        return ragged_rows(found, value_dtype(column))
    texts: npt.NDArray[Any] = found.to_numpy(zero_copy_only=False)
    return texts


def bytes_in_memory(
    columns: Sequence[Column], column_bytes: Sequence[tuple[int, int]], names: Sequence[str]
) -> int:
    """Return the bytes that all rows of the columns `names` take in memory, once they are decompressed.

    `column_bytes` are as in `CacheSpec`. Texts and lists count twice: they are put together for use.
    """
    return sum(
        raw * (2 if is_variable(column) else 1)
        for column, (raw, _) in zip(columns, column_bytes, strict=True)
        if column.name in names
    )
