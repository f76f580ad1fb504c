"""`insitu export` of a cache's rows into a file, a folder or a table, in the order of the partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column
from insitu.grid.caches.arrow_columns import make_batch, make_schema
from insitu.grid.caches.export_files import (
    ARROW,
    CSV,
    PARQUET,
    Rows,
    check_csv,
    check_file,
    check_folder,
    write_file,
    write_folder,
)
from insitu.grid.caches.export_tables import DELTA, POSTGRESQL, DeltaTable, PostgresqlTable
from insitu.grid.reading import read_blocks

SUFFIXES = (PARQUET, CSV, ARROW)
"""Ends of the names of files that take rows."""
Progress = Callable[[int, int], None]
"""Called with the bytes done, and those in all, as they are in the partitions without compression."""


@dataclass(frozen=True, slots=True)
class Export:
    """The outcome of an export."""

    #: The destination, as it can be shown.
    address: str
    #: The version whose rows they are.
    version: int
    #: Rows that are there.
    rows: int
    #: Rows that this call has sent.
    sent: int


class _Destination(Protocol):
    """A place that takes rows as a whole."""

    shown: str

    def check(self, schema: pa.Schema, *, overwrite: bool) -> None:
        """Raise InputError if it can't take such rows, before any are read."""

    def write(self, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
        """Take the rows, all of them or none."""


class _File:
    def __init__(self, path: Path) -> None:
        self._path, self.shown = path, str(path)

    def check(self, schema: pa.Schema, *, overwrite: bool) -> None:
        if self._path.suffix == CSV:
            check_csv(schema)
        check_file(self._path, overwrite=overwrite)

    def write(self, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
        write_file(self._path, schema, rows, overwrite=overwrite)


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path, self.shown = path, f"{path}/"

    def check(self, schema: pa.Schema, *, overwrite: bool) -> None:
        check_folder(self._path, overwrite=overwrite)

    def write(self, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
        write_folder(self._path, schema, rows, overwrite=overwrite)


def takes_rows(destination: str) -> bool:
    """Return whether this is a place for the rows of a cache, other than a table under keys."""
    scheme, separator, _ = destination.partition("://")
    return scheme in (DELTA, POSTGRESQL) if separator else destination.endswith((*SUFFIXES, "/"))


def _find_destination(destination: str) -> _Destination:
    scheme, separator, _ = destination.partition("://")
    if separator and scheme in (DELTA, POSTGRESQL):
        return DeltaTable(destination) if scheme == DELTA else PostgresqlTable(destination)
    path = Path(destination).expanduser().absolute()
    return _Folder(path) if destination.endswith("/") else _File(path)


def export_rows(
    paths: Paths,
    cache: CacheSpec,
    destination: str,
    *,
    columns: Sequence[str] = (),
    limit: int | None = None,
    row_id: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Put the rows of a version into `destination`, for which `takes_rows` is true, in their order.

    `columns` chooses and orders columns; empty: all. `limit` ends after so many rows. `row_id` names a first
    column with the number of each row in the version, int64. Memory holds some blocks of rows. What is there
    stays until the new one is whole, and without `overwrite` it is refused.

    Raises InputError, SourceError, GridError and StorageFull; nothing of the export is left then.

    Example: `export_rows(paths, Catalog(paths).get("orders"), "orders.parquet", row_id="row")`.
    """
    chosen = choose_columns(cache, columns)
    if row_id is not None and (row_id == "" or row_id in {column.name for column in chosen}):
        raise InputError(
            f"--row-id names a column that isn't there yet. Received: {row_id!r}, beside the columns "
            f"{', '.join(column.name for column in chosen)}. Give another name"
        )
    schema, place = make_schema(cache, chosen, row_id), _find_destination(destination)
    place.check(schema, overwrite=overwrite)
    rows = cache.rows if limit is None else min(limit, cache.rows)
    place.write(schema, _read_batches(paths, cache, schema, chosen, rows, progress), overwrite=overwrite)
    return Export(place.shown, cache.version, rows, rows)


def choose_columns(cache: CacheSpec, names: Sequence[str]) -> list[Column]:
    """Return the columns of these names, in their order; all if there are none. Raises InputError."""
    known = {column.name: column for column in cache.columns}
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names):
        raise InputError(
            f"--columns names columns of {cache.name}, each once: {', '.join(known)}. Received: "
            f"{','.join(names)}"
        )
    return [known[name] for name in names] or list(cache.columns)


def _read_batches(
    paths: Paths,
    cache: CacheSpec,
    schema: pa.Schema,
    columns: Sequence[Column],
    rows: int,
    progress: Progress | None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    done, total = 0, cache.raw_bytes * rows // max(1, cache.rows)
    for block in read_blocks(paths, cache, [column.name for column in columns], rows):
        yield block.partition, make_batch(schema, columns, block.values, block.numbers)
        done += block.rows
        if progress is not None:
            progress(total * done // max(1, rows), total)
