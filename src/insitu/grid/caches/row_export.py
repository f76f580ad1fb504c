"""`insitu export`: the rows of a cache into a table of another system, each under its key.

A row replaces the one that the table has under its key, so an export that is done again changes nothing. The
finished part is written down, and `resume` continues behind it.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.context import Context
from insitu.base.disk.access import make_folder
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column
from insitu.grid.caches.cache_export import Export, Progress, choose_columns
from insitu.grid.caches.dataset_opening import dataset
from insitu.grid.catalog import Catalog, publish_file
from insitu.grid.reading import Batch, Dataset
from insitu.grid.sources import find_table_connector, map_ordered

MESSAGE_BYTES = 2 << 20
"""About how many bytes are sent at once."""
_MOST_ROWS = 1 << 14
_KEY = "key"
"""The column of the keys, unless one is named."""


def export_cache(
    paths: Paths,
    name: str,
    address: str,
    *,
    key: str | None = None,
    type_name: str | None = None,
    columns: Sequence[str] = (),
    limit: int | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Put the rows of cache `name`, such as orders or orders@3, into a table of another system, which is made
    if need be.

    `key` is the column whose values are the keys; None: "key" if there is such a column among `columns`, else
    the number of the row. The other ones of `columns` (empty: of all) are the fields of an object of class
    `type_name`, by default the name of the table; a single column "value" is the value itself. `limit` ends
    after so many rows. `resume` continues behind the finished part of an interrupted export of the same rows.

    Raises InputError, SourceError and UnknownCache.
    """
    cache = Catalog(paths).get_named(name)
    rows = cache.rows if limit is None else min(limit, cache.rows)
    key, fields = _choose_fields(cache, key, columns)
    named = {column.name: column for column in cache.columns}
    key_column = named[key] if key is not None else Column(_KEY, "int64")
    writer = find_table_connector(address).make_writer(address, key_column, type_name)
    writer.lay_out(fields)
    target, names = writer.address, [*([key] if key else []), *(column.name for column in fields)]
    context = Context(paths=paths)
    if key is not None:
        _check_distinct(paths, context, cache, key)
    with writer:
        size = max(1, min(_MOST_ROWS, MESSAGE_BYTES * cache.rows // max(1, cache.raw_bytes)))
        batches = _open(paths, context, cache, names).batch(size)
        journal = _Journal(paths, cache, writer.address, [*names, key, size, type_name, rows])
        first = journal.read() if resume else 0

        def send(item: tuple[int, Batch]) -> int:
            first_row, batch = item
            values: Mapping[str, Any] = (
                batch.data if isinstance(batch.data, Mapping) else {names[0]: batch.data}
            )
            kept = min(batch.rows, rows - first_row)
            values = {name: each[:kept] for name, each in values.items()}
            numbers = np.arange(first_row, first_row + kept, dtype=np.int64)
            writer.write(numbers if key is None else values[key], values)
            return kept

        with contextlib.closing(map_ordered(send, _numbered(batches, first, size, rows))) as done:
            for number, _ in enumerate(done, start=first + 1):
                journal.write(number)
                if progress is not None:
                    progress(cache.raw_bytes * min(rows, number * size) // cache.rows, cache.raw_bytes)
        held = writer.count_rows()
    journal.remove()
    if held < rows:
        raise SourceError(
            f"All rows must be in {address} after an export. Received: {held} of {rows}: others were "
            f"removed meanwhile. Export again without --resume"
        )
    return Export(target, cache.version, rows, rows - min(rows, first * size))


def _choose_fields(
    cache: CacheSpec, key: str | None, names: Sequence[str]
) -> tuple[str | None, list[Column]]:
    """Return the column of the keys, None for the number of the row, and the columns beside it.

    Raises InputError.
    """
    chosen = choose_columns(cache, names)
    known = [column.name for column in cache.columns]
    if key is not None and key not in known:
        raise InputError(f"--key names a column of {cache.name}: {', '.join(known)}. Received: {key}")
    key = key or (_KEY if any(column.name == _KEY for column in chosen) else None)
    fields = [column for column in chosen if column.name != key]
    if not fields:
        raise InputError(
            f"An export needs a column beside the key. Received: {key} alone, of {', '.join(known)}. Name "
            f"more by --columns"
        )
    return key, fields


def _numbered(batches: Dataset, first: int, size: int, rows: int) -> Iterator[tuple[int, Batch]]:
    """Yield (number of the first row, batch) from batch `first` on, while that is below `rows`."""
    for number, batch in enumerate(batches.shard_batches(0, 0, first), start=first):
        if number * size >= rows:
            return
        if batch.rows:
            yield number * size, batch


def _open(paths: Paths, context: Context, cache: CacheSpec, names: Sequence[str]) -> Dataset:
    named = f"{cache.name}@{cache.version}"
    return dataset(named, features=names, label=None, paths=paths, context=context)


def _check_distinct(paths: Paths, context: Context, cache: CacheSpec, key: str) -> None:
    """Raise InputError if a key comes twice: one row would replace the other."""
    batches = _open(paths, context, cache, [key]).batch(1 << 16)
    found = [batch.data for batch in batches.shard_batches(0, 0) if batch.rows]
    keys = np.concatenate(found) if found else np.zeros(0)
    distinct = len(set(keys.tolist())) if keys.dtype == object else len(np.unique(keys))
    if distinct != len(keys):
        raise InputError(
            f"The keys of rows that are exported must differ. Received: {len(keys)} rows with {distinct} "
            f"keys in column {key}. Name another column by --key"
        )


class _Journal:
    """How many batches of an export are done, in a file that outlives it."""

    def __init__(self, paths: Paths, cache: CacheSpec, address: str, settings: Sequence[Any]) -> None:
        checksums = [partition.checksum for partition in cache.partitions]
        plan = json.dumps([cache.name, cache.version, checksums, address, *settings])
        self._path: Path = paths.export_journal(f"{zlib.crc32(plan.encode()):08x}")
        self._home = paths.home

    def read(self) -> int:
        """Return how many batches are done; 0 if nothing was written down."""
        try:
            return int(json.loads(self._path.read_text())["batches"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def write(self, batches: int) -> None:
        make_folder(self._home, self._path.parent)
        publish_file(self._path, json.dumps({"batches": batches}).encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
