"""Rows that Python's objects and libraries give: DataFrames, Arrow, arrays, generators, Delta, Iceberg, SQL.

Each is read as Arrow record batches, as often as it is asked. What gives its rows only once, such as a
generator, is first written to a file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from glob import escape, glob
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from insitu.base.errors import InputError, SourceError
from insitu.base.wording import hide_password
from insitu.grid.sources.base import rows_per_block
from insitu.grid.sources.tables import TableBatch, make_tensors, roots_of, select_named

_SAMPLE_ROWS = 1024
_ROWS_AT_ONCE = 1024
"""Rows of a generator that make a batch."""
_SQL_DRIVERS = {"postgresql": "postgresql", "postgres": "postgresql", "sqlite": "sqlite"}
"""Scheme of a database's URL -> the name of its ADBC driver."""

Make = Callable[[Collection[str] | None], Iterator[Any]]


class BatchStream:
    """Rows of an object as a table."""

    format: ClassVar[str] = "rows"
    missing: ClassVar[Mapping[str, int]] = {}
    notes: tuple[str, ...] = ()
    problems = ()

    def __init__(self, name: str, make: Make, rows: int | None = None) -> None:
        """`make(columns)` yields record batches with these columns of the top; None: all. `rows`: how many
        there are; None: that isn't known."""
        self.path, self._make = name, make
        with contextlib.closing(self._batches(None)) as batches:
            first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            raise SourceError(f"{name} has no rows. Leave it out")
        self.sample, self.schema = first.slice(0, _SAMPLE_ROWS), first.schema
        self.counts_rows, self.expected_rows = rows is not None, rows or first.num_rows
        self._row_bytes = max(1.0, first.nbytes / first.num_rows)

    @property
    def expected_bytes(self) -> int:
        """About how many bytes are read."""
        return int(self._row_bytes * self.expected_rows)

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        names = roots_of(wanted, self.schema)
        done = 0
        with contextlib.closing(self._batches(names)) as batches:
            for batch in batches:
                kept = select_named(batch, names)
                rows = rows_per_block(self._row_bytes, block_bytes)
                for first in range(max(0, start - done), batch.num_rows, rows):
                    part = kept.slice(first, rows)
                    end = done + first + part.num_rows
                    yield TableBatch(part, min(self.expected_bytes, int(self._row_bytes * end)), end)
                done += batch.num_rows

    def _batches(self, names: list[str] | None) -> Generator[Any]:
        try:
            yield from self._make(names)
        except (pa.ArrowException, ValueError, TypeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise SourceError(f"{self.path} can't be read: {str(error)[:400]}") from error


# What Python's objects hold


def open_object(data: Any, spool: Path) -> BatchStream:
    """Return the rows of an object. One that gives them only once is written to the folder `spool`.

    Raises InputError for what holds no rows, SourceError if it can't be read.
    """
    name = f"{type(data).__module__.partition('.')[0]}.{type(data).__qualname__}"
    module = type(data).__module__.partition(".")[0]
    if module == "datasets" and hasattr(data, "with_format"):
        return _open_hugging_face(data)
    if isinstance(data, np.ndarray):
        data = {each: data[each] for each in data.dtype.names} if data.dtype.names else {"x": data}
    if isinstance(data, Mapping):
        table = _table_of(data)
        return BatchStream("the arrays", lambda _: iter(table.to_batches()), table.num_rows)
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        table = data
        return BatchStream("the table", lambda _: iter(table.to_batches()), table.num_rows)
    if module == "pandas" and hasattr(data, "columns"):
        return _open_pandas(data)
    if hasattr(data, "element_spec"):
        return BatchStream("the tf.data.Dataset", lambda _: _read_tf_data(data))
    if hasattr(data, "get_fragments"):  # of pyarrow.dataset
        return _open_dataset(data, "the dataset")
    if hasattr(data, "__arrow_c_stream__") and not hasattr(data, "read_next_batch"):
        return BatchStream(f"the {name}", lambda _: iter(pa.RecordBatchReader.from_stream(data)))
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return _spool(_read_rows(data), spool)
    raise InputError(
        f"The source of an import is a path, a URL, a DataFrame, an Arrow table, a dict of arrays, an "
        f"array, a "
        f"tf.data.Dataset, a Hugging Face dataset, or yields rows as dicts. Received: {name}"
    )


def _table_of(columns: Mapping[Any, Any]) -> Any:
    """Return arrays and lists as a table. Raises InputError."""
    arrays = {}
    for name, values in columns.items():
        if str(name) in arrays:
            raise InputError(f"Each column needs a name of its own. Received: {str(name)!r} twice")
        try:
            arrays[str(name)] = _array_of(values)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InputError(
                f"Columns are arrays, or lists of values of one type. Received: {name!r}, which is none "
                f"({str(error).splitlines()[0]:.200})"
            ) from None
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or not arrays:
        raise InputError(f"Columns have as many rows each. Received: {lengths}")
    return pa.table(arrays)


def _array_of(values: Any) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, list | tuple) and values and isinstance(values[0], np.ndarray):
        shapes = {each.shape for each in values}
        if len(shapes) > 1 and all(len(shape) == 1 for shape in shapes):
            return pa.array([each.tolist() for each in values])
        values = np.stack(values)
    array = values if isinstance(values, np.ndarray) else None
    if array is None and hasattr(values, "__array__") and not isinstance(values, list | tuple):
        array = np.asarray(values)
    if array is None:
        return pa.array(values)
    if array.ndim == 1:
        return pa.array(
            array.tolist() if array.dtype.kind == "U" else array, from_pandas=array.dtype.kind == "O"
        )
    if array.ndim == 0:
        raise ValueError("one value")
    if np.ma.is_masked(array):
        raise ValueError("masked values in arrays of several axes")
    return make_tensors(array)


def _open_pandas(data: Any) -> BatchStream:
    try:
        table = pa.Table.from_pandas(data, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InputError(
            f"Columns of a DataFrame have values of one type. Received: "
            f"{' '.join(map(str, error.args)):.300}. "
            f"Convert them, such as by df[column].astype(str)"
        ) from None
    return BatchStream("the DataFrame", lambda _: iter(table.to_batches()), table.num_rows)


def _open_hugging_face(data: Any) -> BatchStream:
    if not hasattr(data, "num_rows"):  # an IterableDataset
        return BatchStream("the dataset", lambda _: _read_rows(iter(data)))

    def read(_: Collection[str] | None) -> Iterator[Any]:
        for table in data.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            yield from table.combine_chunks().to_batches()

    if isinstance(data.num_rows, Mapping):
        raise InputError(
            f"One split is imported at a time. Received: a DatasetDict of {', '.join(data)}. Pass one, "
            f"such as "
            f"dataset[{next(iter(data))!r}]"
        )
    return BatchStream("the dataset", read, int(data.num_rows))


def _open_dataset(data: Any, name: str) -> BatchStream:
    def read(names: Collection[str] | None) -> Iterator[Any]:
        columns = None if names is None else list(names)
        for fragment in data.get_fragments():
            # Without threads of Arrow's own, which might still read as the process exits.
            yield from fragment.to_batches(schema=data.schema, columns=columns, use_threads=False)

    return BatchStream(name, read, data.count_rows())


def _read_tf_data(data: Any) -> Iterator[Any]:
    for element in data.batch(_ROWS_AT_ONCE).as_numpy_iterator():
        named = element if isinstance(element, dict) else {"x": element}
        if isinstance(element, tuple):
            features, *rest = element
            named = dict(features) if isinstance(features, dict) else {"x": features}
            named |= dict(zip(("label", "weight"), rest, strict=False))
        yield from _table_of({name: _decoded(values) for name, values in named.items()}).to_batches()


def _decoded(values: Any) -> Any:
    """Return texts of TensorFlow, which are bytes, as text if they are."""
    if values.dtype.kind != "O":
        return values
    try:
        return pa.array([each.decode() for each in values.ravel()])
    except UnicodeDecodeError:
        return pa.array(list(values.ravel()), pa.large_binary())


def _read_rows(items: Iterable[Any]) -> Iterator[Any]:
    """Yield what is iterated over as record batches: rows as dicts, or tables."""
    iterator = iter(items)
    while rows := list(itertools.islice(iterator, _ROWS_AT_ONCE)):
        if all(isinstance(row, Mapping) for row in rows):
            names = list(dict.fromkeys(name for row in rows for name in row))
            yield from _table_of({name: [row.get(name) for row in rows] for name in names}).to_batches()
            continue
        for each in rows:
            if not hasattr(each, "__arrow_c_stream__") and not isinstance(each, pa.RecordBatch):
                raise InputError(
                    f"A generator of rows yields dicts, or tables. Received: {type(each).__qualname__}"
                )
            yield from pa.table(each).to_batches() if not isinstance(each, pa.RecordBatch) else [each]


def _spool(batches: Iterator[Any], folder: Path) -> BatchStream:
    """Write rows that come only once to a file. Returns them."""
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        raise SourceError("The generator has no rows")
    path, rows = folder / "rows.arrow", 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in itertools.chain([first], batches):
            try:
                writer.write_batch(batch.cast(first.schema))
            except (pa.ArrowException, ValueError) as error:
                raise SourceError(
                    f"All rows of a generator have the columns and types of the first ones: "
                    f"{', '.join(f'{each.name} {each.type}' for each in first.schema)}. Received: "
                    f"{str(error).splitlines()[0]:.200} behind row {rows}"
                ) from None
            rows += batch.num_rows

    def read(_: Collection[str] | None) -> Iterator[Any]:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))

    return BatchStream("the generator", read, rows)


# Tables of other systems, by their libraries


def find_table(source: str, sql: str | None, version: str | None) -> BatchStream | None:
    """Return the table that a path or URL names; None if it is none of Delta, Iceberg or a database.

    `sql`: the query to a database. `version`: of Delta or Iceberg; None: the newest. Raises InputError, and
    SourceError if it can't be read.
    """
    scheme, separator, rest = source.partition("://")
    if sql is not None:
        return _open_sql(source, sql)
    path = Path(rest if scheme in ("delta", "iceberg") and separator else source)
    if scheme == "delta" or (not separator and os.path.isdir(path / "_delta_log")):
        return _open_delta(str(path), version)
    is_iceberg = not separator and bool(glob(f"{escape(str(path))}/metadata/*.metadata.json"))
    if scheme == "iceberg" or is_iceberg:
        return _open_iceberg(
            rest if separator else source, path if is_iceberg or path.exists() else None, version
        )
    if separator and scheme in _SQL_DRIVERS:
        raise InputError(
            f"--sql says which rows of a database are imported, such as --sql 'select * from orders'. "
            f"Received: "
            f"{hide_password(source)} without it"
        )
    if version is not None:
        raise InputError(f"--table-version is of Delta and Iceberg tables. Received: it for {source}")
    return None


def _load(library: str, extra: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise InputError(
            f"{library} must be installed to read this source. Received: {error}. Install it: pip install "
            f"'insitu[{extra}]'"
        ) from error


@contextlib.contextmanager
def _failures_named(name: str) -> Iterator[None]:
    """Raise SourceError for what a library raises, whose errors have no common kind."""
    try:
        yield
    except (SourceError, InputError):
        raise
    except Exception as error:
        text = hide_password(" ".join(str(error).split()))
        raise SourceError(f"{name} can't be read: {text[:400]} ({type(error).__name__})") from error


def _open_delta(path: str, version: str | None) -> BatchStream:
    deltalake = _load("deltalake", "delta")
    if version is not None and not version.isdecimal():
        raise InputError(f"--table-version of a Delta table is a number. Received: {version}")
    with _failures_named(path):
        table = deltalake.DeltaTable(path, version=None if version is None else int(version))
        stream = _open_dataset(table.to_pyarrow_dataset(), path)
        stream.notes = (f"version {table.version()} of the Delta table",)
    return stream


def _open_iceberg(name: str, folder: Path | None, version: str | None) -> BatchStream:
    tables, catalogs = _load("pyiceberg.table", "iceberg"), _load("pyiceberg.catalog", "iceberg")
    with _failures_named(name):
        if folder is not None:
            newest = max(
                (folder / "metadata").glob("*.metadata.json"), key=lambda path: path.stat().st_mtime_ns
            )
            table = tables.StaticTable.from_metadata(str(newest))
        else:
            catalog, _, identifier = name.partition("/")
            table = catalogs.load_catalog(catalog).load_table(identifier)
        if version is not None and not version.isdecimal():
            raise InputError(
                f"--table-version of an Iceberg table is the id of a snapshot. Received: {version}"
            )
        snapshot = table.current_snapshot() if version is None else table.snapshot_by_id(int(version))
        if snapshot is None:
            raise SourceError(f"{name} has no snapshot {version or ''}. Leave it out")
        rows = table.scan(snapshot_id=snapshot.snapshot_id).count()

        def read(names: Collection[str] | None) -> Iterator[Any]:
            fields = ("*",) if names is None else tuple(names)
            scan = table.scan(snapshot_id=snapshot.snapshot_id, selected_fields=fields)
            yield from scan.to_arrow_batch_reader()

        stream = BatchStream(name, read, rows)
        stream.notes = (f"snapshot {snapshot.snapshot_id} of the Iceberg table",)
    return stream


def _open_sql(url: str, query: str) -> BatchStream:
    scheme, _, rest = url.partition("://")
    if scheme not in _SQL_DRIVERS:
        raise InputError(
            f"--sql goes with a database's URL: {', '.join(f'{each}://' for each in _SQL_DRIVERS)}. "
            f"Received: "
            f"{hide_password(url)}"
        )
    extra = _SQL_DRIVERS[scheme]
    driver, name = _load(f"adbc_driver_{extra}.dbapi", extra), hide_password(url)
    target = rest if scheme == "sqlite" else url
    if scheme == "sqlite" and not Path(rest).is_file():  # the driver would make an empty one
        raise SourceError(f"{rest} doesn't exist")

    def execute(text: str) -> Iterator[Any]:
        with _failures_named(name), driver.connect(target) as connection, connection.cursor() as cursor:
            cursor.execute(text)
            yield from cursor.fetch_record_batch()

    plain = query.strip().rstrip(";")
    (counted,) = execute(f"select count(*) as n from ({plain}) as q")
    return BatchStream(name, lambda _: execute(plain), int(counted.column(0)[0].as_py()))
