"""Keeps predictions with the ids of their rows: in a table of another system, in a cache, or in a file.

Each task of a job writes those of its own shards. Into a table they go as they come: a row replaces the one
under its key, so that what is written again changes nothing. For other targets each shard becomes a file in
the job's folder; the task that completes them publishes all.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from insitu.base.context import Context
from insitu.base.disk.durable import staged_file
from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column, check_cache_name
from insitu.grid.caches.arrow_columns import to_arrow
from insitu.grid.catalog import full_disk_as_error, is_catalog_copy, publish_file
from insitu.grid.importing import import_cache
from insitu.grid.intake import check_key
from insitu.grid.partitions import TEXT
from insitu.grid.reading import ROW, Batch, CacheReader, Dataset, numbers_rows
from insitu.grid.sources import Connector, find_connector

KEY, VALUE = "key", "value"
FILES = (".parquet", ".csv")
"""The ends of targets that are files."""
Outputs = Mapping[str, Any]
"""Name -> array [rows, ...] of an output of a model; one output has the name VALUE."""
Ids = Mapping[str, Any]
"""KEY -> the keys of some rows, ROW -> their numbers; one of them at least."""

_calls: Counter[tuple[str, str]] = Counter()
"""(job, target) -> how often this process has begun to predict into it: as often as all tasks."""


class PredictionTarget(Protocol):
    """The place to which predictions are written."""

    joins_parts: bool
    """Whether a call is known by its number, by which tasks find each other's parts."""

    def write(self, shard: int, ids: Ids, outputs: Outputs) -> None:
        """Keep the outputs of some rows of a shard with their ids."""

    def has(self, shard: int) -> bool:
        """Return whether all rows of a shard are there, from an earlier life of this task."""

    def complete(self, shard: int) -> None:
        """Note that no more rows of a shard follow."""

    def close(self, *, whole: bool) -> None:
        """End the writing; `whole`: of all shards of this task."""


class IdReader:
    """Reads the ids of the rows of batches: keys if there are some, and numbers."""

    def __init__(self, dataset: Dataset, key: str | None) -> None:
        """Raises InputError for a column that can't be keys, and for rows without ids."""
        self._dataset, self._numbers = dataset, numbers_rows(dataset.cache)
        cache, name = dataset.cache, key or KEY
        columns = {column.name: column for column in cache.columns}
        if name not in columns and (key is not None or not self._numbers):
            raise InputError(
                f"Predictions are under the keys of their rows. Received: cache {cache.name}, which has no "
                f"column {name!r} but {', '.join(columns)}. Name the column of keys by key="
            )
        self.key = columns.get(name, Column(ROW, "int64"))
        """The column of the keys; ROW if the number of a row is its key."""
        check_key(self.key.name, (self.key,))
        self._reader: CacheReader | None = None
        if name in columns:
            self._reader = dataset._reader.read_others([name])

    def read(self, shard: int, batch: Batch) -> Ids:
        """Return the ids of the rows of a batch."""
        ids: dict[str, Any] = {}
        if self._reader is not None:
            held, starts = self._dataset.shard_map.shards[shard], self._reader.starts(shard)
            begins = {partition: starts[k] for k, partition in enumerate(held)}
            positions = [begins[partition] + rows for partition, rows in batch.origins]
            ids[KEY] = self._reader.read_positions(shard, np.concatenate(positions))
        if self._numbers:
            ids[ROW] = self._dataset._reader.number_rows(batch.origins)
        return ids


def open_target(
    target: str, dataset: Dataset, context: Context, key: Column, type_name: str | None
) -> PredictionTarget:
    """Return the place for predictions of the rows of `dataset`. `key` is the column of their keys.

    Raises InputError and SourceError.
    """
    connector = find_connector(target)
    if connector is not None:
        return TablePredictions(connector, target, key, type_name)
    if type_name is not None:
        raise InputError(f"type_name is a class of another system. Received: it with {target}. Leave it out")
    if target.endswith(FILES):
        return FilePredictions(Path(target).absolute(), context, dataset)
    return CachePredictions(check_cache_name(target), context, dataset)


class TablePredictions:
    """Puts predictions into a table of another system, which is made if need be."""

    joins_parts = False

    def __init__(self, connector: Connector, address: str, key: Column, type_name: str | None) -> None:
        self._writer = connector.make_writer(address, key, type_name).__enter__()
        self._is_laid_out = False

    def write(self, shard: int, ids: Ids, outputs: Outputs) -> None:
        if not self._is_laid_out:
            self._writer.lay_out([_find_column(name, values) for name, values in outputs.items()])
            self._is_laid_out = True
        self._writer.write(ids[KEY] if KEY in ids else ids[ROW], outputs)

    def has(self, shard: int) -> bool:
        return False  # written again, they replace themselves

    def complete(self, shard: int) -> None:
        """Nothing is left to do: rows are there as soon as they are written."""

    def close(self, *, whole: bool) -> None:
        self._writer.__exit__(None, None, None)


class _Parts:
    """A file for each shard. The task that completes them publishes all of them as one whole."""

    joins_parts = True

    def __init__(self, name: str, what: str, context: Context, dataset: Dataset) -> None:
        """`name` is that of the folder of the parts, `what` the target in errors."""
        self._what, self._shards = what, dataset.num_shards
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if context.job is None:
            if context.by_hand or context.shared_secret is not None:
                raise InputError(
                    f"Several processes that no job has started can predict into a table of another system. "
                    f"Received: {what}. Start them by `insitu start`, or give an address such as ignite://..."
                )
            self._temporary = tempfile.TemporaryDirectory(prefix="insitu-predictions-")
            self._folder = Path(self._temporary.name)
        else:
            if is_catalog_copy(context.paths):
                raise InputError(
                    f"On hosts of agents predictions go into a table of another system. Received: {what}. "
                    f"Give an address such as ignite://..., or run the job with --engine local"
                )
            number = _calls[str(context.job.root), name]
            _calls[str(context.job.root), name] += 1
            self._folder = context.job.predictions(name, number)
            self._folder.mkdir(parents=True, exist_ok=True)
        self._mark = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._writers: dict[int, pq.ParquetWriter] = {}

    def _part(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.parquet"

    def _staged(self, shard: int) -> Path:
        """Return the path to which this process writes a part: another task may write it, too."""
        return self._folder / f"shard-{shard:05d}.{self._mark}"

    def has(self, shard: int) -> bool:
        return self._part(shard).exists()

    def write(self, shard: int, ids: Ids, outputs: Outputs) -> None:
        named = [name for name in outputs if name in (KEY, ROW)]
        if named:
            raise InputError(
                f"{KEY} and {ROW} are the ids of rows. Received: an output of that name ({named[0]}). Give "
                f"it another name in the model"
            )
        table = self._make_table({**dict(sorted(ids.items(), reverse=True)), **outputs})
        if shard not in self._writers:
            self._writers[shard] = pq.ParquetWriter(self._staged(shard), table.schema)
        self._writers[shard].write_table(table)

    def _make_table(self, columns: Mapping[str, Any]) -> pa.Table:
        return pa.table({name: to_arrow(values) for name, values in columns.items()})

    def complete(self, shard: int) -> None:
        writer = self._writers.pop(shard, None)
        if writer is not None:
            writer.close()
            self._staged(shard).replace(self._part(shard))
        else:  # a shard without rows
            publish_file(self._part(shard), b"")

    def close(self, *, whole: bool) -> None:
        for writer in self._writers.values():
            writer.close()
        try:
            if whole:
                self._join()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def _join(self) -> None:
        """Publish the parts of all shards, unless some are missing, or another task has done it."""
        done = self._folder / "done.json"
        with (self._folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            parts = [self._part(shard) for shard in range(self._shards)]
            if done.exists() or not all(part.exists() for part in parts):
                return
            filled = [part for part in parts if part.stat().st_size]
            if not filled:
                raise SourceError("Predictions must have rows. Received: none in any shard")
            publish_file(done, json.dumps(self._publish(filled)).encode())

    def _publish(self, parts: Sequence[Path]) -> Mapping[str, Any]:
        """Make one whole of the parts of all shards that have rows. Returns what is noted of it."""
        raise NotImplementedError


class CachePredictions(_Parts):
    """Makes a version of a cache of insitu of the predictions of all shards."""

    def __init__(self, name: str, context: Context, dataset: Dataset) -> None:
        super().__init__(name, f"cache {name}", context, dataset)
        self._name, self._paths = name, context.paths

    def _publish(self, parts: Sequence[Path]) -> Mapping[str, Any]:
        ids = pq.read_schema(parts[0]).names
        sources, key = [str(part) for part in parts], KEY if KEY in ids else ROW
        (cache,) = import_cache(self._paths, self._name, sources, key=key, overwrite=True)
        return {"cache": cache.name, "version": cache.version, "rows": cache.rows}


class FilePredictions(_Parts):
    """Makes a Parquet or CSV file of the predictions of all shards. A file that is there is replaced."""

    def __init__(self, path: Path, context: Context, dataset: Dataset) -> None:
        if not path.parent.is_dir():
            raise InputError(
                f"Predictions are written into a folder that exists. Received: {path}. Make its folder before"
            )
        super().__init__(f"file-{zlib.crc32(os.fsencode(path)):08x}", f"file {path}", context, dataset)
        self._path = path
        cache = dataset.cache
        #: Metadata of a Parquet file: the numbers of its rows are those of this version.
        self._metadata = {"cache": cache.name, "version": str(cache.version)}

    def _make_table(self, columns: Mapping[str, Any]) -> pa.Table:
        if self._path.suffix == ".csv":
            columns = _spread(columns)
        return super()._make_table(columns).replace_schema_metadata(self._metadata)

    def _publish(self, parts: Sequence[Path]) -> Mapping[str, Any]:
        schema, rows = pq.read_schema(parts[0]), 0
        make: Any = pc.CSVWriter if self._path.suffix == ".csv" else pq.ParquetWriter
        with staged_file(self._path) as staged, full_disk_as_error(self._path, advice="Free some space"):
            with make(str(staged), schema) as writer:
                for part in parts:
                    with pq.ParquetFile(part) as file:
                        for batch in file.iter_batches():
                            writer.write_batch(batch)
                            rows += batch.num_rows
            staged.replace(self._path)
        return {"file": str(self._path), "rows": rows}


def _spread(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return columns with one number a row: of an array "value" they are value_0, value_1 and so on."""
    spread: dict[str, Any] = {}
    for name, values in columns.items():
        flat = np.asarray(values)
        if flat.ndim > 1:
            flat = flat.reshape(len(flat), -1)
        parts = {name: flat} if flat.ndim == 1 else {f"{name}_{n}": each for n, each in enumerate(flat.T)}
        twice = sorted(spread.keys() & parts.keys())
        if twice:
            raise InputError(
                f"Columns of a CSV file have names of their own. Received: {twice[0]} of two outputs. Name "
                f"them otherwise, or write a .parquet file"
            )
        spread |= parts
    return spread


def _find_column(name: str, values: Any) -> Column:
    array = np.asarray(values)
    dtype = TEXT if array.dtype.kind in "OSU" else array.dtype.name
    return Column(name, dtype, tuple(array.shape[1:]))
