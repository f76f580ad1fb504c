"""Keeps predictions under the keys of their rows: in a cache of Apache Ignite, or in one of insitu.

Each task of a job writes those of its own shards. Into Ignite they go as they come: a row replaces the one
under its key, so that what is written again changes nothing. For a cache of insitu each shard becomes a file
in the job's folder; the task that completes them imports all.
"""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from insitu.context import Context
from insitu.errors import InputError, SourceError
from insitu.grid.cache_reader import CacheReader
from insitu.grid.catalog_copy import is_catalog_copy
from insitu.grid.datasets import Batch, Dataset
from insitu.grid.files import publish_file
from insitu.grid.ignite import Cluster, encoding, is_ignite_address, parse_address, read_settings
from insitu.grid.importer import import_cache
from insitu.grid.partitions import TEXT
from insitu.paths import Paths
from insitu.spec import Column, check_cache_name

KEY, VALUE = "key", "value"
Outputs = Mapping[str, Any]
"""Name -> array [rows, ...] of an output of a model; one output has the name VALUE."""

_calls: Counter[tuple[str, str]] = Counter()
"""(job, cache) -> how often this process has begun to predict into it: as often as all tasks."""


class PredictionTarget(Protocol):
    """Where predictions go."""

    def write(self, shard: int, keys: Any, outputs: Outputs) -> None:
        """Keep the outputs of some rows of a shard under their keys."""

    def has(self, shard: int) -> bool:
        """Return whether all rows of a shard are there, from an earlier life of this task."""

    def complete(self, shard: int) -> None:
        """Note that no more rows of a shard follow."""

    def close(self, *, whole: bool) -> None:
        """End the writing; `whole`: of all shards of this task."""


class KeyReader:
    """Reads the keys of the rows of batches."""

    def __init__(self, dataset: Dataset, key: str | None) -> None:
        """Raises InputError for a column that can't be keys."""
        self._dataset = dataset
        cache, name = dataset.cache, key or KEY
        columns = {column.name: column for column in cache.columns}
        if name not in columns:
            raise InputError(
                f"Predictions lie under the keys of their rows. Received: cache {cache.name}, which has no "
                f"column {name!r} but {', '.join(columns)}. Name the column of keys by key="
            )
        self.column = columns[name]
        encoding.check_key(self.column)
        self._reader: CacheReader = dataset._reader.read_others([name])

    def read(self, shard: int, batch: Batch) -> Any:
        """Return the key of each row of a batch."""
        held, starts = self._dataset.shard_map.shards[shard], self._reader.starts(shard)
        begins = {partition: starts[k] for k, partition in enumerate(held)}
        positions = [begins[partition] + rows for partition, rows in batch.origins]
        return self._reader.read_positions(shard, np.concatenate(positions))


def open_target(
    target: str, dataset: Dataset, context: Context, key: Column, type_name: str | None
) -> PredictionTarget:
    """Return where predictions of the rows of `dataset` go. `key` is the column of their keys.

    Raises InputError and SourceError.
    """
    if is_ignite_address(target):
        return IgnitePredictions(target, key, type_name)
    if type_name is not None:
        raise InputError(f"type_name is a class of Ignite. Received: it with cache {target}. Leave it out")
    return CachePredictions(check_cache_name(target), context.paths, context, dataset.num_shards, key)


class IgnitePredictions:
    """Puts predictions into a cache of Ignite, which is made if need be."""

    def __init__(self, address: str, key: Column, type_name: str | None) -> None:
        target = parse_address(address)
        self._key, self._type_name = key, type_name or target.cache
        self._cluster = Cluster(target, read_settings())
        if self._cluster.make_cache().name.startswith("SQL_"):
            self._cluster.__exit__(None, None, None)
            raise InputError(
                f"Predictions go into a cache of keys and values. Received: the SQL table {target.cache}. "
                f"Name another cache, and copy from there by SQL"
            )
        self._cluster.find_layout()
        #: How values are written; None before the first ones, and where they are no objects.
        self._layout: encoding.ObjectLayout | None = None
        self._columns: list[Column] | None = None

    def write(self, shard: int, keys: Any, outputs: Outputs) -> None:
        if self._columns is None:
            self._columns = [_find_column(name, values) for name, values in outputs.items()]
            if [column.name for column in self._columns] != [VALUE]:
                self._layout = encoding.lay_out(self._type_name, self._columns)
                for kind in self._layout.kinds:
                    self._cluster.put_type(kind)
        if self._layout is None:
            contents = encoding.encode_column(self._columns[0], outputs[VALUE])
        else:
            contents = self._layout.encode(outputs)
        rows = encoding.join([encoding.encode_column(self._key, keys), contents])
        self._cluster.put_rows(len(rows.lengths), rows.data.tobytes())

    def has(self, shard: int) -> bool:
        return False  # written again, they replace themselves

    def complete(self, shard: int) -> None:
        """Nothing is left to do: rows are there as soon as they are written."""

    def close(self, *, whole: bool) -> None:
        self._cluster.__exit__(None, None, None)


class CachePredictions:
    """Makes a version of a cache of insitu of the predictions of all shards."""

    def __init__(self, name: str, paths: Paths, context: Context, shards: int, key: Column) -> None:
        self._name, self._paths, self._shards, self._key = name, paths, shards, key
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if context.job is None:
            if context.by_hand or context.shared_secret is not None:
                raise InputError(
                    f"Several processes that no job has started can predict into a cache of Ignite. "
                    f"Received: cache {name}. Start them by `insitu start`, or give an address ignite://..."
                )
            self._temporary = tempfile.TemporaryDirectory(prefix="insitu-predictions-")
            self._folder = Path(self._temporary.name)
        else:
            if is_catalog_copy(paths):
                raise InputError(
                    f"On hosts of agents predictions go into a cache of Ignite. Received: cache {name}. Give "
                    f"an address ignite://..., or run the job with --engine local"
                )
            number = _calls[str(context.job.root), name]
            _calls[str(context.job.root), name] += 1
            self._folder = context.job.predictions(name, number)
            self._folder.mkdir(parents=True, exist_ok=True)
        self._writers: dict[int, pq.ParquetWriter] = {}

    def _part(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.parquet"

    def has(self, shard: int) -> bool:
        return self._part(shard).exists()

    def write(self, shard: int, keys: Any, outputs: Outputs) -> None:
        columns = {KEY: keys, **outputs}
        table = pa.table({name: _to_arrow(values) for name, values in columns.items()})
        if shard not in self._writers:
            staged = self._part(shard).with_suffix(".staged")
            self._writers[shard] = pq.ParquetWriter(staged, table.schema)
        self._writers[shard].write_table(table)

    def complete(self, shard: int) -> None:
        writer = self._writers.pop(shard, None)
        if writer is not None:
            writer.close()
            self._part(shard).with_suffix(".staged").replace(self._part(shard))
        else:  # a shard without rows
            publish_file(self._part(shard), b"")

    def close(self, *, whole: bool) -> None:
        for writer in self._writers.values():
            writer.close()
        try:
            if whole:
                self._import()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def _import(self) -> None:
        """Import the parts of all shards, unless some are missing, or another task has done it."""
        done = self._folder / "done.json"
        with (self._folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            parts = [self._part(shard) for shard in range(self._shards)]
            if done.exists() or not all(part.exists() for part in parts):
                return
            filled = [str(part) for part in parts if part.stat().st_size]
            if not filled:
                raise SourceError("Predictions must have rows. Received: none in any shard")
            (cache,) = import_cache(self._paths, self._name, filled, key=KEY, overwrite=True)
            publish_file(done, json.dumps({"version": cache.version, "rows": cache.rows}).encode())


def _find_column(name: str, values: Any) -> Column:
    array = np.asarray(values)
    dtype = TEXT if array.dtype.kind in "OSU" else array.dtype.name
    column = Column(name, dtype, tuple(array.shape[1:]))
    encoding.find_code(column)
    return column


def _to_arrow(values: Any) -> pa.Array:
    array = np.asarray(values)
    if array.dtype.kind in "OSU":
        return pa.array(array.tolist(), pa.large_string())
    if array.ndim == 1:
        return pa.array(array)
    shape = array.shape[1:]
    return (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
        if len(shape) > 1
        else (pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), shape[0]))
    )
