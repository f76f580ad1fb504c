"""Rows to look at, drawn at random from the partitions that lie on this machine, at a bounded cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.grid.cache_reader import CacheReader
from insitu.grid.catalog import Catalog
from insitu.grid.copies_here import check_here, find_missing_here
from insitu.grid.layout import draw_rows
from insitu.paths import Paths
from insitu.spec import CacheSpec, ShardMap

MOST_BYTES = 32 << 20
"""Bytes that a sample holds, about."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """Rows of one version of a cache."""

    #: The version.
    cache: CacheSpec
    #: By column, [rows, *shape] each; of text and lists an array of objects.
    columns: Mapping[str, Any]
    #: How many rows there are.
    rows: int


def sample_rows(paths: Paths, name: str, count: int, seed: int = 0, run: int = 1) -> RowSample:
    """Return up to `count` rows of the latest version of a cache, fewer where they take
    more than MOST_BYTES.

    They are drawn in runs of `run` neighbours in their partition, so that few blocks are read. All
    rows come where there are no more. The same `seed` in [0, 2**63) gives the same rows. Raises UnknownCache,
    CorruptPartition, and GridError where no partition lies on this machine.
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
    positions = _draw_positions(total, most, seed, run)
    if not len(positions):
        return RowSample(cache, {column: np.empty(0) for column in names}, 0)
    shard_map = ShardMap(cache.name, cache.version, (here,))
    reader = CacheReader(paths, cache, shard_map, (0,), None, names, None)
    read = reader.read_positions(0, positions)
    found: Any = read if isinstance(read, dict) else {names[0]: read}
    return RowSample(cache, found, len(positions))


def _measure_row(cache: CacheSpec) -> int:
    """Return about how many bytes a row takes in memory."""
    stored = cache.raw_bytes if cache.codec is not None else cache.bytes
    return stored // max(1, cache.rows)


def _draw_positions(total: int, count: int, seed: int, run: int) -> Any:
    if total <= count:
        return np.arange(total)
    run = min(run, count)
    runs = -(-total // run)
    drawn = [numbers for _, _, numbers in draw_rows([runs], max(1, count // run), seed)]
    starts = np.concatenate(drawn) * run
    positions = (starts[:, None] + np.arange(run)).ravel()
    return positions[positions < total]
