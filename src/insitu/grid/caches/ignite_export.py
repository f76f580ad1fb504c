"""`insitu export`: the rows of a cache into a cache of Apache Ignite, each under its key.

A row replaces the one that Ignite has under its key, so an export that is done again changes nothing. The
finished part is written down, and `resume` continues behind it.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.context import Context
from insitu.base.disk.access import make_folder
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column
from insitu.grid.caches.dataset_opening import dataset
from insitu.grid.catalog import Catalog, publish_file
from insitu.grid.ignite import Cluster, encoding, parse_address, read_settings
from insitu.grid.reading import Batch, Dataset
from insitu.grid.sources import map_ordered

MESSAGE_BYTES = 2 << 20
"""About how many bytes are sent at once."""
_MOST_ROWS = 1 << 14
_KEY, _VALUE = "key", "value"
"""The columns that `insitu import` makes of a key and a value that are no objects."""


@dataclass(frozen=True, slots=True)
class Export:
    """The progress of an export."""

    #: The address of the rows.
    address: str
    #: The version whose rows they are.
    version: int
    #: Rows of the cache.
    rows: int
    #: Rows that this call has sent.
    sent: int


def export_cache(
    paths: Paths,
    name: str,
    address: str,
    *,
    key: str | None = None,
    type_name: str | None = None,
    without: Sequence[str] = (),
    resume: bool = False,
) -> Export:
    """Put the rows of the latest version of cache `name` into a cache of Ignite, which is made if need be.

    `key` is the column whose values are the keys; None: "key" if there is such a column, else the number of
    the row. The other columns, less those `without`, are the fields of an object of class `type_name`, by
    default the name of the cache in Ignite; a single column "value" is the value itself. `resume` continues
    behind the finished part of an interrupted export of the same rows.

    Raises InputError, SourceError and UnknownCache.
    """
    cache = Catalog(paths).get(name)
    target = parse_address(address)
    rows = _RowEncoder(cache, key, type_name or target.cache, without)
    context = Context(paths=paths)
    if rows.key is not None:
        _check_distinct(paths, context, cache, rows.key)
    with Cluster(target, read_settings()) as cluster:
        configuration = cluster.make_cache()
        if configuration.name.startswith("SQL_"):
            raise InputError(
                f"Rows are exported into a cache of keys and values. Received: the SQL table {target.cache}. "
                f"Name another cache, and copy from there by SQL"
            )
        for kind in rows.layout.kinds if rows.layout else ():
            cluster.put_type(kind)
        cluster.find_layout()
        size = max(1, min(_MOST_ROWS, MESSAGE_BYTES * cache.rows // max(1, cache.raw_bytes)))
        batches = _open(paths, context, cache, rows.names).batch(size)
        journal = _Journal(paths, cache, str(cluster.address), [*rows.names, rows.key, size, type_name])
        first = journal.read() if resume else 0

        def send(item: tuple[int, Batch]) -> int:
            first_row, batch = item
            cluster.put_rows(batch.rows, rows.encode(batch.data, first_row, batch.rows))
            return batch.rows

        with contextlib.closing(map_ordered(send, _numbered(batches, first, size))) as done:
            for number, _ in enumerate(done, start=first + 1):
                journal.write(number)
        held = cluster.count_rows()
    if held < cache.rows:
        journal.remove()
        raise SourceError(
            f"All rows must be in {address} after an export. Received: {held} of {cache.rows}: others were "
            f"removed meanwhile. Export again without --resume"
        )
    journal.remove()
    return Export(str(target), cache.version, cache.rows, cache.rows - min(cache.rows, first * size))


def _numbered(batches: Dataset, first: int, size: int) -> Iterator[tuple[int, Batch]]:
    """Yield (number of the first row, batch) from batch `first` on."""
    for number, batch in enumerate(batches.shard_batches(0, 0, first), start=first):
        if batch.rows:
            yield number * size, batch


def _open(paths: Paths, context: Context, cache: CacheSpec, names: Sequence[str]) -> Dataset:
    found = dataset(cache.name, features=names, label=None, paths=paths, context=context)
    if found.cache.version != cache.version:
        raise SourceError(
            f"A cache must stay as it is until its rows are exported. Received: {cache.name} with version "
            f"{found.cache.version} after {cache.version}. Export again"
        )
    return found


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


class _RowEncoder:
    """Writes rows as keys and values of Ignite."""

    def __init__(self, cache: CacheSpec, key: str | None, type_name: str, without: Sequence[str]) -> None:
        """Raises InputError for columns that can't be exported."""
        columns = {column.name: column for column in cache.columns}
        unknown = [name for name in [*without, *([key] if key else [])] if name not in columns]
        if unknown:
            raise InputError(
                f"--key and --without name columns of {cache.name}, which has {', '.join(columns)}. "
                f"Received: {', '.join(unknown)}"
            )
        self.key = key or (_KEY if _KEY in columns and _KEY not in without else None)
        """The column of the keys; None: the number of the row."""
        if self.key is not None:
            encoding.check_key(columns[self.key])
        self._columns: list[Column] = [
            column for name, column in columns.items() if name != self.key and name not in without
        ]
        if not self._columns:
            raise InputError(
                f"An export needs a column beside the key. Received: {cache.name} with "
                f"{', '.join(columns)}. Leave fewer out"
            )
        self._all = columns
        plain = [column.name for column in self._columns] == [_VALUE]
        self.layout = None if plain else encoding.lay_out(type_name, self._columns)
        """How the values are written; None: they are no objects."""
        if plain:
            encoding.find_code(self._columns[0])

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return [*([self.key] if self.key else []), *(column.name for column in self._columns)]

    def encode(self, data: Any, first_row: int, count: int) -> bytes:
        """Return keys and values of some rows in turn, the first of which has number `first_row`."""
        values: Mapping[str, Any] = data if isinstance(data, Mapping) else {self.names[0]: data}
        if self.key is None:
            numbers = np.arange(first_row, first_row + count, dtype=np.int64)
            keys = encoding.encode_column(Column(_KEY, "int64"), numbers)
        else:
            keys = encoding.encode_column(self._all[self.key], values[self.key])
        if self.layout is None:
            contents = encoding.encode_column(self._columns[0], values[_VALUE])
        else:
            contents = self.layout.encode(values)
        return encoding.join([keys, contents]).data.tobytes()


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
