"""Rows of a version block by block, in the order of its partitions, for what reads a cache once.

Each block is read from the disk and verified; another replica takes the place of a damaged one. Memory holds
one block, or all of a partition that has no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from insitu.base.paths import Paths
from insitu.base.process.processes import memory_bytes
from insitu.base.spec import CacheSpec, Column, ShardMap
from insitu.grid.catalog import check_here
from insitu.grid.layout import Rows, draw_rows
from insitu.grid.partitions import TEXT, is_variable, row_bytes
from insitu.grid.reading.cache_reader import CacheReader
from insitu.grid.reading.store import Copy, open_blocks, open_version

_ROWS_AT_ONCE = 1 << 14
"""Rows of a partition without blocks that are given together."""
_SAMPLE_BYTES = 16 << 20
"""Bytes of drawn rows that are given together, about."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Some rows of a version."""

    #: The partition that they are in.
    partition: int
    #: The number in the version of each row, int64[rows], ascending.
    numbers: Rows
    #: By column, an array [rows, *shape]; of text and lists an Arrow array of large strings or binaries.
    values: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return len(self.numbers)


def read_blocks(
    paths: Paths, cache: CacheSpec, names: Sequence[str], limit: int | None = None
) -> Iterator[BlockRows]:
    """Yield the columns `names` of all rows, or of the first `limit` ones, in the order of the partitions.

    Raises GridError if partitions are on other hosts alone, UnknownCache if the version is removed meanwhile,
    and CorruptPartition.
    """
    columns = [column for column in cache.columns if column.name in names]
    left = cache.rows if limit is None else min(limit, cache.rows)
    starts = _first_rows(cache)
    needed = [p.index for p in cache.partitions if p.rows and starts[p.index] < left]
    check_here(paths, cache, needed)
    for index in needed:
        copy = open_version(paths, cache, index, None)
        for start, values in _read_partition(paths, cache, copy, columns):
            rows = min(left, _count(values))
            cut = values if rows == _count(values) else {name: each[:rows] for name, each in values.items()}
            first = int(starts[index]) + start
            yield BlockRows(index, np.arange(first, first + rows, dtype=np.int64), cut)
            left -= rows
            if not left:
                return


def read_drawn(
    paths: Paths, cache: CacheSpec, names: Sequence[str], count: int, seed: int
) -> Iterator[BlockRows]:
    """Yield the columns `names` of up to `count` rows, each drawn at random from all, without repetition.

    They come in the order of the partitions. The same `seed` in [0, 2**63) gives the same rows. Raises as
    `read_blocks` does.
    """
    starts = _first_rows(cache)
    drawn = draw_rows([partition.rows for partition in cache.partitions], count, seed)
    numbers = [np.sort(rows) + starts[index] for index, _, rows in drawn]
    yield from read_numbered(paths, cache, names, np.concatenate([np.empty(0, np.int64), *numbers]))


def read_numbered(paths: Paths, cache: CacheSpec, names: Sequence[str], numbers: Rows) -> Iterator[BlockRows]:
    """Yield the columns `names` of the rows with these numbers in the version, int64[rows], ascending.

    Their blocks alone are read. Raises as `read_blocks` does.
    """
    columns = [column for column in cache.columns if column.name in names]
    starts = _first_rows(cache)
    every = tuple(partition.index for partition in cache.partitions)
    parts = np.searchsorted(starts, numbers, side="right") - 1
    check_here(paths, cache, np.unique(parts).tolist())
    shard_map = ShardMap(cache.name, cache.version, (every,))
    wanted = tuple(column.name for column in columns)
    reader = CacheReader(paths, cache, shard_map, (0,), None, wanted, None)
    at_once = max(1, _SAMPLE_BYTES // max(1, cache.raw_bytes // max(1, cache.rows)))
    for index in np.unique(parts).tolist():
        here = numbers[parts == index]
        for start in range(0, len(here), at_once):
            some = here[start : start + at_once]
            found: Any = reader.read_positions(0, some)
            values = found if len(wanted) > 1 else {wanted[0]: found}
            yield BlockRows(index, some, {c.name: to_block(c, values[c.name]) for c in columns})


def _first_rows(cache: CacheSpec) -> Rows:
    """Return the number of each partition's first row."""
    return np.cumsum([0, *(partition.rows for partition in cache.partitions)], dtype=np.int64)


def _count(values: Mapping[str, Any]) -> int:
    return len(next(iter(values.values())))


def _read_partition(
    paths: Paths, cache: CacheSpec, copy: Copy, columns: Sequence[Column]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (the first row's number in the partition, values by column) of the blocks of a partition."""
    rows = copy.info.rows
    if not cache.block_rows:  # of a version that was imported before there were blocks
        for start in range(0, rows, _ROWS_AT_ONCE):
            stop = min(rows, start + _ROWS_AT_ONCE)
            held = {c.name: copy.partition.values[c.name].slice(start, stop) for c in columns}
            yield start, {column.name: to_block(column, held[column.name]) for column in columns}
        return
    blocks = open_blocks(paths, cache, copy, columns, direct=cache.bytes >= memory_bytes() // 2)
    for number, start in enumerate(range(0, rows, cache.block_rows)):
        memory = np.empty(blocks.size(number), np.uint8)
        blocks.read(number, memory)
        places, count = blocks.column_starts(number), min(cache.block_rows, rows - start)
        values: dict[str, Any] = {}
        for column in columns:
            if is_variable(column):
                values[column.name] = blocks.texts(number, memory, column.name)
            else:
                first = places[column.name]
                part = memory[first : first + count * row_bytes(column)]
                values[column.name] = part.view(column.dtype).reshape(count, *column.shape)
        yield start, values


def to_block(column: Column, values: Any) -> Any:
    """Return values of a column as `BlockRows` has them: those of text and lists come as objects."""
    if not is_variable(column):
        return np.ascontiguousarray(values)
    if column.dtype == TEXT:
        return pa.array(list(values), pa.large_utf8())
    return pa.array([np.ascontiguousarray(value).tobytes() for value in values], pa.large_binary())
