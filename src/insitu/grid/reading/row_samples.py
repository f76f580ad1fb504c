"""Rows to look at, drawn at random from the partitions on this machine, at a bounded cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, ShardMap
from insitu.grid.catalog import Catalog, check_here, find_missing_here
from insitu.grid.layout import draw_rows
from insitu.grid.reading.cache_reader import CacheReader

MOST_BYTES = 32 << 20
"""Bytes that a sample holds, about."""
_BLOCK_BYTES = 1 << 20
"""Bytes of a block, about, which is read whole."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """Rows of one version of a cache."""

    #: The version.
    cache: CacheSpec
    #: By column, [rows, *shape] each; of text and lists an array of objects.
    columns: Mapping[str, Any]
    #: How many rows there are.
    rows: int
    #: How many neighbours were drawn together; 1: each row by itself.
    run: int = 1


def sample_rows(paths: Paths, name: str, count: int, seed: int = 0, places: int | None = None) -> RowSample:
    """Return up to `count` rows of the latest version of a cache, fewer if they take more than MOST_BYTES.

    Each is drawn at random. With `places`, about as many blocks are read at most: if there are more, the rows
    are runs of neighbours, one at a random place in each of `places` equal parts. All rows come if there are
    no more. The same `seed` in [0, 2**63) gives the same rows. Raises UnknownCache, CorruptPartition, and
    GridError if no partition is on this machine.
    """
    cache = Catalog(paths).get(name)
    indices = range(len(cache.partitions))
    missing = set(find_missing_here(paths, cache, indices))
    here = tuple(index for index in indices if index not in missing)
    if missing and not here:
        check_here(paths, cache, (0,))
    total = sum(cache.partitions[index].rows for index in here)
    names = tuple(column.name for column in cache.columns)
    row_bytes = max(1, _measure_row(cache))
    most = max(1, min(count, MOST_BYTES // row_bytes))
    few_blocks = places is None or cache.bytes // _BLOCK_BYTES <= places
    run = 1 if few_blocks or places is None else -(-most // places)
    positions = _draw_positions(total, most, seed, run)
    if not len(positions):
        return RowSample(cache, {column: np.empty(0) for column in names}, 0)
    shard_map = ShardMap(cache.name, cache.version, (here,))
    reader = CacheReader(paths, cache, shard_map, (0,), None, names, None)
    read = reader.read_positions(0, positions)
    found: Any = read if isinstance(read, dict) else {names[0]: read}
    return RowSample(cache, found, len(positions), run)


def _measure_row(cache: CacheSpec) -> int:
    """Return about how many bytes a row takes in memory."""
    stored = cache.raw_bytes if cache.codec is not None else cache.bytes
    return stored // max(1, cache.rows)


def _draw_positions(total: int, count: int, seed: int, run: int) -> Any:
    if total <= count:
        return np.arange(total)
    if run == 1:
        return np.concatenate([numbers for _, _, numbers in draw_rows([total], count, seed)])
    parts = count // run
    ends = total * np.arange(parts + 1) // parts
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    starts = random.integers(ends[:-1], ends[1:] - run, endpoint=True)
    return (starts[:, None] + np.arange(run)).ravel()
