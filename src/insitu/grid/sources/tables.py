"""Tables of Arrow record batches as sources: what Parquet, CSV, JSON lines and Arrow IPC have in common.

`table_layout.py` says which columns they make, `conditions.py` which rows are kept; values are made here.
A missing value of a floating column is NaN; of any other it takes the place that `--fill` names, or is
refused, since it would have to be made up.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import urllib.parse
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT, is_ragged, value_dtype
from insitu.grid.sources.base import Block, SourceOptions, TableColumn, native, raw_bytes
from insitu.grid.sources.column_options import ALL_COLUMNS, ColumnOptions
from insitu.grid.sources.conditions import Condition
from insitu.grid.sources.huggingface import LABEL
from insitu.grid.sources.table_layout import (
    ColumnProblems,
    Described,
    Problem,
    describe_missing,
    describe_type,
    fill_remedy,
    flatten_schema,
    is_bytes,
    is_list,
    is_text,
    number_names,
    plan_layout,
)
from insitu.grid.sources.text_forms import parse_times

_PART_OF_FOLDER = re.compile(r"([A-Za-z_][\w .-]*)=(.*)")
"""The name of a folder whose files have one value of a column, as Hive writes them."""
_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_COMPUTED = ("mean", "most")
_PASS_BYTES = 4 << 20
"""Bytes of a table that are read at once for what follows from all rows."""
_MOST_EXACT = float(1 << 53)
"""Below it float64 holds each whole number."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class TableBatch:
    """Some consecutive rows of a table."""

    #: The rows as a record batch.
    rows: Any
    #: Bytes of the file that have been read by their end.
    source_bytes: int
    #: The argument of `TableReader.batches` to begin with the row that follows.
    next_start: int


class TableReader(Protocol):
    """One file of a table's rows. Made with (path, options), which reads its beginning and keeps nothing
    open."""

    path: Any
    #: Arrow's schema; its types may be those of the first rows alone.
    schema: Any
    #: The first rows, as a record batch.
    sample: Any
    #: How many rows there are, or about so many.
    expected_rows: int
    #: Whether it is exactly so many.
    counts_rows: bool

    @property
    def format(self) -> str: ...

    @property
    def missing(self) -> Mapping[str, int]:
        """Values that are missing, by column, as far as the file itself says so."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was inferred of the file, for users."""
        ...

    @property
    def problems(self) -> Sequence[Problem]:
        """What its text was read by that the user must say."""
        ...

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        """Yield the rows of `Source.blocks`. `wanted`: the columns that are needed, those of structs as in
        user.age, with the types that they are best read as."""
        ...


class ArrowSource:
    """A table as a source of an import. It has columns once it is arranged."""

    def __init__(self, table: TableReader) -> None:
        self._table = table
        self.format, self.path = table.format, table.path
        #: The names of the table's columns, each given once, and notes on those that the table has twice.
        self._names, self._renamed = number_names(table.schema.names)
        self._columns = pa.schema(
            [each.with_name(name) for name, each in zip(self._names, table.schema, strict=True)]
        )
        names = [name for name, _ in flatten_schema(self._columns)]
        self._folders = {n: v for n, v in _read_folders(str(table.path)).items() if n not in names}
        #: The columns that the names of its folders make.
        self.folders = self._folders.keys()
        kinds = [(name, _type_of_folder(value)) for name, value in self._folders.items()]
        self.schema = pa.schema([*flatten_schema(self._columns), *kinds])
        self._layout: tuple[TableColumn, ...] = ()
        self.sample = self._complete(table.sample)
        self.missing, self.problems = {} if self._renamed else table.missing, table.problems
        self.expected_rows = table.expected_rows
        self.columns: tuple[Column, ...] = ()
        self._condition: Condition | None = None
        self._dropped: tuple[str, ...] = ()

    @property
    def layout(self) -> tuple[TableColumn, ...]:
        """Its columns, and where they come from."""
        return self._layout

    @property
    def notes(self) -> tuple[str, ...]:
        """What was inferred of the file, for users."""
        found = [*self._table.notes, *self._renamed]
        if self._folders:
            found.append(f"columns of folders: {', '.join(self._folders)}")
        kinds = dict(zip(self.schema.names, self.schema.types, strict=True))
        for to in self._layout:
            kind = kinds.get(to.source)
            hint = getattr(self._table, "hints", {}).get(to.source)
            if hint and to.column.dtype == TEXT:
                found.append(hint)
            if to.column.logical:
                found.append(f"{to.source}: {to.column.logical} as int64")
            elif kind is not None and pa.types.is_decimal(kind):
                found.append(f"{to.source}: {kind} as {to.column.dtype}")
            elif kind is not None and is_bytes(kind) and is_ragged(to.column):
                found.append(f"{to.source}: bytes as lists of uint8")
            if to.source not in self._dropped and _may_be_nan(to) and self._count_missing(to.source):
                found.append(f"{to.source}: missing values are NaN")
        return tuple(found)

    def _count_missing(self, name: str) -> int:
        if name in self.missing:
            return self.missing[name]
        place = self.sample.schema.get_field_index(name)
        return 0 if place < 0 else int(self.sample.column(place).null_count)

    @property
    def counts_rows(self) -> bool:
        """Whether `expected_rows` are the rows of its blocks."""
        return self._table.counts_rows and self._condition is None and not self._dropped

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes of its column `label`; empty if the file names none."""
        is_kept = any(
            (to.source, to.column.name, to.column.dtype) == (LABEL, LABEL, "int64") for to in self._layout
        )
        return tuple(getattr(self._table, "labels", ())) if is_kept else ()

    @property
    def skipped(self) -> list[str]:
        """What is wrong with each image that was passed over so far."""
        return list(getattr(self._table, "skipped", ()))

    @property
    def row_starts(self) -> list[int]:
        """Rows at which reading can begin without decoding rows before them."""
        return getattr(self._table, "row_starts", [0]) if self.counts_rows else [0]

    def arrange(self, layout: tuple[TableColumn, ...], options: ColumnOptions) -> None:
        """Give its blocks these columns. Raises InputError."""
        self._layout = layout
        self.columns = tuple(each.column for each in layout)
        if options.where is not None:
            self._condition = Condition(options.where)
            self._condition.check(self.schema.names)
        sources = dict.fromkeys(each.source for each in layout)
        self._dropped = tuple(sources) if ALL_COLUMNS in options.drop_nulls else options.drop_nulls

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        row: int | None = None if start else 0
        with arrow_errors(self.path):
            for each in self.batches(block_bytes, start):
                rows = self.keep_rows(each.rows)
                row = row if rows is each.rows else None
                if rows.num_rows:
                    values = {
                        to.column.name: make_values(_column_of(rows, to), to, self.path, row)
                        for to in self._layout
                    }
                    yield Block(values, rows.num_rows, each.source_bytes, each.next_start)
                row = None if row is None else row + rows.num_rows

    def batches(self, block_bytes: int, start: int = 0) -> Iterator[TableBatch]:
        """Yield all rows with the columns that are needed, as they are in the table."""
        wanted = {each.source: reading_type(each) for each in self._layout if not each.is_mask}
        needed = {*self._dropped, *(self._condition.columns if self._condition else ())}
        wanted |= dict.fromkeys(sorted(needed - wanted.keys()))
        wanted = {name: kind for name, kind in wanted.items() if name not in self._folders}
        if self._renamed:
            in_file = dict(zip(self._names, self._table.schema.names, strict=True))
            wanted = dict.fromkeys(in_file[name] for name in roots_of(wanted, self._columns))
        with contextlib.closing(self._table.batches(block_bytes, start, wanted)) as batches:
            for each in batches:
                rows = _without_empty_times(self._complete(each.rows), self._layout)
                yield TableBatch(rows, each.source_bytes, each.next_start)

    def describe_missing_values(self) -> list[Problem]:
        """Return the columns that miss values that they need. All rows are read."""
        found: Counter[str] = Counter()
        for each in self.batches(_PASS_BYTES):
            rows = self.keep_rows(each.rows)
            for to in self._layout:
                if not _may_be_missing(to):
                    found[to.source] += _column_of(rows, to).null_count
        columns = {to.source: to.column for to in self._layout}
        return [
            Problem(name, describe_missing(count), fill_remedy(name, columns[name]))
            for name, count in found.items()
            if count
        ]

    def _complete(self, batch: Any) -> Any:
        """Return a batch without structs, with the columns of its folders."""
        if self._renamed:  # all columns of one name are read together, and follow each other as in the file
            numbered: dict[str, list[str]] = {}
            for name, in_file in zip(self._names, self._table.schema.names, strict=True):
                numbered.setdefault(in_file, []).append(name)
            batch = batch.rename_columns([numbered[name].pop(0) for name in batch.schema.names])
        flat = flatten_batch(batch)
        if not self._folders:
            return flat
        names, arrays = list(flat.schema.names), list(flat.columns)
        for name, value in self._folders.items():
            names.append(name)
            kind = _type_of_folder(value)
            wanted = next((reading_type(to) for to in self._layout if to.source == name), None)
            if wanted is not None and (pa.types.is_null(kind) or is_text(wanted)):
                kind = wanted  # so that a condition compares one type in all files
            text = pa.scalar(None if value == _NO_VALUE else value, pa.large_utf8())
            no_values = pa.nulls(flat.num_rows, kind)
            arrays.append(pa.repeat(text, flat.num_rows).cast(kind) if text.is_valid else no_values)
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def keep_rows(self, batch: Any) -> Any:
        """Return the rows of a batch that are kept; the batch itself if all are."""
        if self._condition is None and not self._dropped:
            return batch
        table = pa.Table.from_batches([batch])
        if self._condition is not None:
            table = self._condition.filter(table)
        for name in self._dropped:
            if name not in table.schema.names:  # of a file without this column
                return batch.slice(0, 0)
            table = table.filter(pc.invert(pc.is_null(table.column(name), nan_is_null=True)))
        kept = table.combine_chunks().to_batches()
        return kept[0] if kept else batch.slice(0, 0)


def arrange_tables(tables: Sequence[ArrowSource], options: SourceOptions) -> None:
    """Give tables the columns that they make together. Raises InputError, SourceError."""
    fields = options.fields
    layout = options.layout or plan_layout(tables, fields, options.ragged_columns, options.base)
    for table in tables:
        table.arrange(layout, fields)
    if any(to.fill in _COMPUTED for to in layout):
        layout = _compute_fills(tables, layout)
        for table in tables:
            table.arrange(layout, fields)
    for to in layout:
        check_fill(to)


def _compute_fills(tables: Sequence[ArrowSource], layout: tuple[TableColumn, ...]) -> tuple[TableColumn, ...]:
    """Return the layout with the mean, or the most frequent value, in the place of these words. All rows are
    read."""
    wanted = [to for to in layout if to.fill in _COMPUTED]
    for to in wanted:
        check_fill(to)
    sums = {to.source: (0.0, 0) for to in wanted}
    counts: dict[str, Counter[str]] = {to.source: Counter() for to in wanted}
    for table in tables:
        for batch in table.batches(_PASS_BYTES):
            rows = table.keep_rows(batch.rows)
            for to in wanted:
                values = _column_of(rows, to).drop_null()
                if to.fill == "most":
                    texts = pc.value_counts(values.cast(pa.large_utf8()))
                    counts[to.source].update({each["values"]: each["counts"] for each in texts.to_pylist()})
                elif len(values):
                    numbers = values.cast(pa.float64(), safe=False)  # their mean is rounded anyway
                    numbers = numbers.filter(pc.invert(pc.is_nan(numbers)))
                    total, count = sums[to.source]
                    sums[to.source] = (total + (pc.sum(numbers).as_py() or 0.0), count + len(numbers))

    def resolve(to: TableColumn) -> TableColumn:
        if to.fill == "most" and counts[to.source]:
            return replace(to, fill=min(counts[to.source].items(), key=lambda each: (-each[1], each[0]))[0])
        if to.fill == "mean" and sums[to.source][1]:
            mean = sums[to.source][0] / sums[to.source][1]
            return replace(to, fill=repr(mean) if to.column.dtype.startswith("float") else str(round(mean)))
        if to.fill in _COMPUTED:
            raise InputError(f"--fill {to.source}={to.fill} needs values. Received: a column without any")
        return to

    return tuple(map(resolve, layout))


def _column_of(rows: Any, to: TableColumn) -> Any:
    """Return the values of a column; those of one that this file doesn't have are missing."""
    place = rows.schema.get_field_index(to.source)
    return pa.nulls(rows.num_rows) if place < 0 else rows.column(place)


def _read_folders(path: str) -> dict[str, str]:
    """Return the columns that the names of a file's folders make."""
    folders = path.split("/")[:-1]
    found = (_PART_OF_FOLDER.fullmatch(urllib.parse.unquote(part)) for part in folders)
    return {each[1]: each[2] for each in found if each}


def _type_of_folder(value: str) -> Any:
    """Return the type of a value that the name of a folder has: of numbers, if these are the same as text."""
    if value == _NO_VALUE:
        return pa.null()
    if re.fullmatch(r"-?\d{1,18}", value) and str(int(value)) == value:
        return pa.int64()
    is_float = re.fullmatch(r"-?\d{1,15}\.\d{1,15}", value) and str(float(value)) == value
    return pa.float64() if is_float else pa.large_utf8()


def _without_empty_times(batch: Any, layout: Sequence[TableColumn]) -> Any:
    """Return a batch in which empty texts that times are made of are missing values."""
    for to in layout:
        place = batch.schema.get_field_index(to.source)
        if to.form not in ("", "json") and place >= 0 and is_text(batch.column(place).type):
            values = _make_texts(batch.column(place), replace(to, fill=None))
            missing = pc.equal(pc.utf8_trim_whitespace(values), "")
            if pc.any(missing).as_py():
                values = pc.if_else(missing, pa.scalar(None, values.type), values)
                batch = batch.set_column(place, to.source, values)
    return batch


def make_tensors(array: Any) -> Any:
    """Return an array [rows, *shape] as an Arrow array: of tensors of one shape, if rows have axes."""
    array = np.ascontiguousarray(array)
    if array.ndim == 1:
        return pa.array(array)
    flat = pa.array(array.reshape(-1))
    kind = pa.fixed_shape_tensor(flat.type, array.shape[1:])
    lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    return pa.ExtensionArray.from_storage(kind, lists.cast(kind.storage_type))


def flatten_batch(batch: Any) -> Any:
    """Return a batch in which fields of structs are columns, named as in user.age."""
    if not any(pa.types.is_struct(each.type) or pa.types.is_dictionary(each.type) for each in batch.schema):
        return batch
    names: list[str] = []
    arrays: list[Any] = []

    def add(name: str, values: Any) -> None:
        if pa.types.is_struct(values.type) and values.type.num_fields:
            # Of a struct that is missing all fields are.
            for number, inner in enumerate(values.flatten()):
                add(f"{name}.{values.type.field(number).name}", inner)
        else:
            if pa.types.is_dictionary(values.type) and values.dictionary.null_count:
                values = _decode(values)  # no value counts as missing of those that point to a missing one
            names.append(name)
            arrays.append(values)

    for each, values in zip(batch.schema, batch.columns, strict=True):
        add(each.name, values)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def roots_of(names: Iterable[str], schema: Any) -> list[str]:
    """Return which columns of a schema hold those named as in user.age. Their own names may have dots."""
    roots, found = set(schema.names), set()
    for name in names:
        root = name
        while root and root not in roots:
            root = root.rpartition(".")[0]
        found |= {root} & roots  # none of a column that this table lacks
    return sorted(found)


def select_named(batch: Any, names: Iterable[str]) -> Any:
    """Return a batch with its columns of these names, of which it may have several alike."""
    wanted = {*names}
    return batch.select([place for place, name in enumerate(batch.schema.names) if name in wanted])


def is_of_the_system(error: Exception) -> bool:
    """Return whether an error comes from the system, such as for missing permission, and not from Arrow."""
    return isinstance(error, OSError) and error.errno is not None


@contextlib.contextmanager
def arrow_errors(path: object) -> Iterator[None]:
    """Turn what Arrow raises for a file that isn't whole or of another format into SourceError."""
    try:
        yield
    except (pa.ArrowException, EOFError, OSError) as error:
        if is_of_the_system(error):
            raise
        raise SourceError(
            f"{path} can't be read: {error}. It may be truncated or of another format (see --format)"
        ) from error


@dataclass(frozen=True, slots=True)
class _OneBatch:
    """A batch as a table that is described."""

    path: object
    sample: Any

    @property
    def schema(self) -> Any:
        return self.sample.schema

    @property
    def missing(self) -> Mapping[str, int]:
        return {}

    @property
    def problems(self) -> Sequence[Problem]:
        return ()


def columns_of_batch(batch: Any, path: object, ragged: frozenset[str] = frozenset()) -> tuple[Column, ...]:
    """Return the columns of rows that begin with those of a batch. Lists of the columns `ragged` may have any
    length. Raises SourceError."""
    described: Described = _OneBatch(path, flatten_batch(batch))
    known = frozenset(ragged & set(described.schema.names))
    return tuple(each.column for each in plan_layout([described], ColumnOptions(), known))


def values_of_batch(batch: Any, columns: tuple[Column, ...], path: object) -> dict[str, Any]:
    """Return a batch's values as a Block holds them. Raises SourceError if rows differ in shape."""
    flat = flatten_batch(batch)
    layout = [TableColumn(column.name, column) for column in columns]
    return {to.source: make_values(_column_of(flat, to), to, path, None) for to in layout}


# Values


def reading_type(to: TableColumn) -> Any:
    """Return the type of Arrow that text is best read as to make a column; None: as it is."""
    if to.form == "json":
        return None
    if to.form or to.column.dtype == TEXT:
        return pa.large_utf8()
    if to.column.logical:
        return logical_type(to.column)
    if to.column.shape or is_ragged(to.column):
        return None
    if to.column.dtype == "bool":
        return pa.bool_()
    if to.column.dtype == "uint64":
        return pa.uint64()
    return pa.float64() if to.column.dtype.startswith("float") else pa.int64()


def logical_type(column: Column) -> Any:
    """Return Arrow's type of a column of times."""
    text = column.logical
    found = re.fullmatch(r"(timestamp|duration|time32|time64|date32|date64)\[(\w+)(?:, tz=(.+))?\]", text)
    if found is None:
        raise SourceError(f"A column of times has a type of Arrow. Received: {text!r}")
    name, unit, zone = found.groups()
    if name == "timestamp":
        return pa.timestamp(unit, zone)
    if name.startswith("date"):
        return getattr(pa, name)()
    return getattr(pa, name)(unit)


def _may_be_nan(to: TableColumn) -> bool:
    floats = to.column.dtype.startswith("float") and not to.column.shape and not is_ragged(to.column)
    return floats and to.fill is None


def _may_be_missing(to: TableColumn) -> bool:
    return to.is_mask or to.form == "json" or to.fill is not None or _may_be_nan(to)


def write_json(values: Sequence[Any], fill: Any) -> Any:
    """Return values as an Arrow array of JSON texts; `fill` takes the place of null, which is JSON's else."""
    encode = json.JSONEncoder(default=_plain, ensure_ascii=False).encode
    null = encode(None) if fill is None else fill
    return pa.array([null if each is None else encode(each) for each in values], pa.large_utf8())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def make_values(values: Any, to: TableColumn, path: object, row: int | None) -> Any:
    """Return the values of an Arrow array as a Block holds them. `row`: the number of the first one in its
    file, for errors; None: unknown. Raises SourceError."""
    if to.is_mask:
        return pc.is_null(values, nan_is_null=True).to_numpy(zero_copy_only=False)
    if values.null_count and not _may_be_missing(to):
        raise _missing(values, to, path, row)
    try:
        if to.form == "json":
            return write_json(values.to_pylist(), to.fill)
        if to.column.dtype == TEXT:
            return _make_texts(values, to)
        if is_ragged(to.column):
            return _make_ragged(values, to.column, path)
        return native(_make_numbers(values, to, path))
    except pa.ArrowException as error:
        if "UTF8" in str(error):
            raise SourceError(
                f"{path} can't be read: column {to.source!r} is of text and has bytes that no UTF-8 text "
                f"has. Write "
                f"it as bytes, or correct them"
            ) from error
        where = "" if row is None else f" of the rows from {row} on"
        wanted = to.column.logical or ("text" if to.column.dtype == TEXT else to.column.dtype)
        raise SourceError(
            f"{path}: values{where} of column {to.source!r}, of {describe_type(values.type)}, must be "
            f"{wanted}: "
            f"{str(error).splitlines()[0]:.200}. Name the type that all values have by --dtype "
            f"{to.source}=DTYPE, "
            f"such as {to.source}=str, or correct them"
        ) from error


def _missing(values: Any, to: TableColumn, path: object, row: int | None) -> ColumnProblems:
    first = int(pc.index(values.is_null(), True).as_py())
    where = "in a block of rows" if row is None else f"in row {row + first}, counted from 0,"
    text = f"has no value {where} and {values.null_count - 1} more"
    if values.null_count == 1:
        text = f"has no value {where.rstrip(',')}"
    return MissingValues(path, [Problem(to.source, text, fill_remedy(to.source, to.column))])


def _missing_in_lists(to: TableColumn, path: object, dtype: str = "float64") -> ColumnProblems:
    """Return the error for what is missing within the lists of a column, whose floats may be NaN."""
    text = "has lists in which values are missing"
    return ColumnProblems(path, [Problem(to.source, text, ("--dtype", f"{to.source}={dtype}"))])


class MissingValues(ColumnProblems):
    """Values are missing that can't be."""


def check_fill(to: TableColumn) -> None:
    """Raise InputError if what takes the place of missing values can't."""
    if to.fill is None or to.fill in _COMPUTED:
        has_lists = to.column.shape or is_ragged(to.column)
        if to.fill and (has_lists or to.form == "json"):
            raise InputError(
                f"--fill {to.source}={to.fill} needs one value a row. Received: a column of {to.column.dtype}"
            )
        if to.fill == "mean" and (to.column.dtype in (TEXT, "bool") or to.column.logical):
            raise InputError(
                f"--fill {to.source}=mean is for numbers. Received: a column of {to.column.dtype}"
            )
        return
    if to.column.shape:
        raise InputError(
            f"--fill takes a column of one value a row. Received: {to.source} with rows of shape "
            f"{list(to.column.shape)}. Drop rows without one by --drop-nulls {to.source}"
        )
    if is_ragged(to.column) and to.fill:
        raise InputError(
            f"--fill makes empty lists of missing ones. Received: {to.source}={to.fill} for "
            f"{to.column.dtype}. Give --fill {to.source}=null"
        )
    if to.column.dtype == TEXT or is_ragged(to.column):
        return
    try:
        _parse_fill(to)
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise InputError(
            f"--fill needs a value of the column's type. Received: {to.source}={to.fill} for "
            f"{to.column.logical or to.column.dtype} ({str(error).splitlines()[0]:.100})"
        ) from None


def _parse_fill(to: TableColumn) -> Any:
    """Return the value that takes the place of missing ones. Raises ValueError and what Arrow raises."""
    text = to.fill or ""
    if to.column.logical:
        kind = logical_type(to.column)
        if to.form and text != "0":
            with contextlib.suppress(pa.ArrowException):
                return parse_times(pa.array([text]), to.form, kind.unit).cast(kind)[0]
        if not re.fullmatch(r"-?\d+", text):
            return pa.scalar(text).cast(kind)
        return pa.scalar(int(text), pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    dtype = np.dtype(to.column.dtype)
    if dtype.kind == "b":
        if text.lower() not in _BOOLS:
            raise ValueError(f"{', '.join(_BOOLS)} are bools")
        return pa.scalar(_BOOLS[text.lower()])
    if dtype.kind == "f":
        return pa.scalar(dtype.type(float(text)), pa.from_numpy_dtype(dtype))
    return pa.scalar(int(text), pa.from_numpy_dtype(dtype))


def _filled(values: Any, fill: Any) -> Any:
    return pc.fill_null(values, fill) if values.null_count else values


def _decode(values: Any) -> Any:
    """Return the values that the numbers of a dictionary stand for."""
    words = values.dictionary
    # Arrow can't decode views.
    words = words.cast(pa.large_utf8()) if words.type == pa.string_view() else words
    return pa.DictionaryArray.from_arrays(values.indices, words).dictionary_decode()


def _make_texts(values: Any, to: TableColumn) -> Any:
    if pa.types.is_dictionary(values.type):
        values = _decode(values)
    texts = values.cast(pa.large_utf8())
    # Parquet's reader takes any bytes for text.
    texts.validate(full=True)
    return texts if to.fill is None else _filled(texts, pa.scalar(to.fill, pa.large_utf8()))


def _make_numbers(values: Any, to: TableColumn, path: object) -> Any:
    column = to.column
    if pa.types.is_dictionary(values.type):
        values = _decode(values)
    if column.logical:
        kind = logical_type(column)
        if to.form:  # such as of 20240131, which is a number
            values = values if is_text(values.type) else values.cast(pa.large_utf8())
            values = parse_times(values, to.form, kind.unit)
        values = values.cast(kind)
        values = values if to.fill is None else _filled(values, _parse_fill(to))
        narrow = pa.int32() if kind.bit_width == 32 else pa.int64()
        return values.cast(narrow).cast(pa.int64()).to_numpy(zero_copy_only=False)
    if column.shape and is_bytes(values.type):
        return _unpack_bytes(values, column, path)
    array = _tensor(values, pa.from_numpy_dtype(np.dtype(column.dtype)), to, path)
    if array.ndim == 2 and array.shape[1] == math.prod(column.shape):
        array = array.reshape(len(array), *column.shape)  # lists of values, whose shape --tensor names
    if array.shape[1:] != column.shape:
        raise mixed_shapes(path, to.source, column.shape, array.shape[1:])
    return array


def mixed_shapes(path: object, name: str, first: Sequence[int], second: Sequence[int]) -> SourceError:
    """Return the error for a column whose rows differ in shape."""
    return SourceError(
        f"{path}: column {name!r} is of mixed shapes: first {list(first)}, then {list(second)}. Pad or cut "
        f"its rows to one shape; give images one size and mode, such as by --reader images --reader-option "
        f"size=224,224 --reader-option mode=RGB"
    )


def _unpack_bytes(values: Any, column: Column, path: object) -> Any:
    """Return bytes as tensors, which are in little-endian order."""
    dtype = np.dtype(column.dtype)
    wanted = dtype.itemsize * math.prod(column.shape)
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    if (lengths != wanted).any():
        row = int(np.argmax(lengths != wanted))
        raise SourceError(
            f"{path}: --tensor {column.name}={dtype}{list(column.shape)} needs {wanted} bytes in each row. "
            f"Received: {int(lengths[row])} bytes"
        )
    flat = np.frombuffer(b"".join(values.to_pylist()), dtype.newbyteorder("<"))
    return flat.reshape(len(values), *column.shape)


def _tensor(values: Any, leaf: Any, to: TableColumn, path: object) -> Any:
    """Return numbers, or lists of them at any depth, as one array [rows, ...] of a type. Raises
    SourceError."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.permutation and list(kind.permutation) != sorted(kind.permutation):
            raise SourceError(f"{path}: column {to.source!r} holds permuted tensors. Store them in row order")
        flat = _tensor(values.storage, leaf, to, path)
        return flat.reshape(len(values), *kind.shape)
    if pa.types.is_dictionary(kind):
        return _tensor(_decode(values), leaf, to, path)
    if is_list(kind):
        return _equal_lists(values, leaf, to, path)
    if kind != leaf:
        wide, values = values, values.cast(leaf)
        if pa.types.is_floating(kind) and pa.types.is_floating(leaf) and leaf.bit_width < kind.bit_width:
            _refuse_infinite(wide, values)
        elif pa.types.is_decimal(kind) and kind.scale <= 0 and pa.types.is_floating(leaf):
            _refuse_inexact(wide, values)
    if to.column.shape or to.fill is None:
        fill = pa.scalar(float("nan"), leaf) if pa.types.is_floating(leaf) else None
    else:
        fill = _parse_fill(to)
        if pa.types.is_floating(leaf):
            values = pc.if_else(pc.is_nan(values), fill, values)
    if values.null_count and fill is not None:
        values = pc.fill_null(values, fill)
    if values.null_count:
        raise _missing(values, to, path, None) if not to.column.shape else _missing_in_lists(to, path)
    return values.to_numpy(zero_copy_only=False)


def _refuse_infinite(values: Any, narrow: Any) -> None:
    """Raise ArrowInvalid for a number that is too large for a narrower type of floats."""
    wrong = values.filter(pc.and_(pc.is_finite(values), pc.invert(pc.is_finite(narrow))))
    if len(wrong):
        raise pa.ArrowInvalid(f"{wrong[0]} is too large for {narrow.type}")


def _refuse_inexact(decimals: Any, floats: Any) -> None:
    """Raise ArrowInvalid for a whole number, such as an id, that floats don't hold."""
    is_large = pc.greater_equal(pc.abs(floats), _MOST_EXACT)
    if pc.any(is_large).as_py():
        pairs = zip(decimals.filter(is_large).to_pylist(), floats.filter(is_large).to_pylist(), strict=True)
        for decimal, number in pairs:
            if not math.isfinite(number) or int(decimal) != int(number):
                raise pa.ArrowInvalid(f"{decimal} is no number that {floats.type} holds")


def _equal_lists(values: Any, leaf: Any, to: TableColumn, path: object) -> Any:
    if values.null_count:
        raise _missing_in_lists(to, path, "json")
    if pa.types.is_fixed_size_list(values.type):
        length = values.type.list_size
    else:
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            row = int(np.argmax(lengths != length))
            raise SourceError(
                f"{path}: column {to.source!r} is of mixed shapes: lists of {length} and of "
                f"{int(lengths[row])} values. Pad or cut them to one length, or import the column as it is "
                f"by --ragged {to.source}"
            )
    inner = _tensor(values.flatten(), leaf, to, path)
    return inner.reshape(len(values), length, *inner.shape[1:])


def _make_ragged(values: Any, column: Column, path: object) -> Any:
    """Return lists as an Arrow array of large binaries, with the values of each row."""
    if is_bytes(values.type):
        return pc.fill_null(values.cast(pa.large_binary()), b"")
    dtype = value_dtype(column)
    if not is_list(values.type):
        raise SourceError(f"{path}: column {column.name!r} is of type {values.type}, not of lists")
    if is_list(values.type.value_type):
        raise SourceError(
            f"{path}: a ragged column has rows that are lists of numbers or bools. Received: column "
            f"{column.name!r} of type {values.type}. Keep it as text by --dtype {column.name}=json"
        )
    inner = TableColumn(column.name, Column(column.name, dtype.name, (1,)))
    flat = native(_tensor(values.flatten(), pa.from_numpy_dtype(dtype), inner, path))
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths))) * dtype.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(raw_bytes(flat))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)
