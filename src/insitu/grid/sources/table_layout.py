"""Works out the columns of a cache from the tables that are imported, and what the user says of them. Pure.

All tables of an import get one layout: their columns are matched by name, and their types are widened to
those that hold the values of all. Structs become a column for each field, such as user.age. Times become
whole numbers, decimals float64, bytes lists of uint8. A column that can't be taken as it is, is named
together with the options that take it, all columns at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.base.wording import format_count, suggest_name
from insitu.grid.partitions import RAGGED, TEXT
from insitu.grid.sources.base import TableColumn
from insitu.grid.sources.column_options import ALL_COLUMNS, DTYPES, TIME_WORDS, ColumnOptions

ENDING_OF_MASK = "_is_null"
"""Behind the name of a column: that of the column which says which of its values were missing."""
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A column, or a file, that can't be taken as it is."""

    #: The column; empty: it is about the file.
    column: str
    #: What is wrong with it.
    text: str
    #: The arguments of the command line that take it.
    remedy: tuple[str, ...]
    #: Whether it is about the dtype that the user gives it.
    is_given: bool = False

    def __str__(self) -> str:
        return f"column {self.column!r} {self.text}" if self.column else self.text


class Described(Protocol):
    """What a layout needs to know of a table."""

    @property
    def path(self) -> object: ...

    @property
    def schema(self) -> Any:
        """Arrow's schema without structs: their fields are columns."""
        ...

    @property
    def sample(self) -> Any:
        """Its first rows, as a table of that schema."""
        ...

    @property
    def missing(self) -> Mapping[str, int]:
        """How many values of columns are missing, as far as the file itself says so."""
        ...

    @property
    def problems(self) -> Sequence[Problem]:
        """What its text was read by that the user hasn't said."""
        ...


class ColumnProblems(SourceError):
    """Columns of sources can't be taken as they are."""

    def __init__(
        self, place: object, problems: Sequence[Problem], layout: Sequence[TableColumn] = ()
    ) -> None:
        """`layout`: the columns that can be taken."""
        self.place, self.layout = place, tuple(layout)
        self.problems = tuple({each.remedy: each for each in reversed(problems)}.values())[::-1]
        more = f"; and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        super().__init__(
            f"{place} can't be imported as it is: {'; '.join(map(str, self.problems[:_SHOWN]))}{more}. "
            f"Add {shlex.join(self.remedy)}"
        )

    @property
    def remedy(self) -> tuple[str, ...]:
        """The arguments of the command line that take all columns."""
        return tuple(part for each in self.problems for part in each.remedy)


@dataclass(slots=True)
class _Found:
    """A column of the sources."""

    #: The type that holds the values of all tables.
    kind: Any
    #: The tables that have it.
    tables: list[Described] = field(default_factory=list)
    #: Why no type does; empty: one does.
    conflict: str = ""


def flatten_schema(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, type) of the columns of a schema; fields of structs are named as in user.age."""
    for each in schema:
        if pa.types.is_struct(each.type) and each.type.num_fields:
            inner = pa.schema([each.type.field(i) for i in range(each.type.num_fields)])
            yield from ((f"{each.name}.{name}", kind) for name, kind in flatten_schema(inner))
        else:
            yield each.name, each.type


def number_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names of which each is there once, notes on those that differ from `names`).

    A later `a` becomes a_2, or the next of a_3, a_4, ... that `names` don't have. A column without a name
    is column_ and its place, from 1.
    """
    taken, used = set(names), set[str]()
    numbered, notes = [], []
    for place, given in enumerate(names, 1):
        name, number = given or f"column_{place}", 2
        base = name
        while name in used or (name != given and name in taken):
            name, number = f"{base}_{number}", number + 1
        used.add(name)
        numbered.append(name)
        if name != given:
            which = f"column {place}, another {given}," if given else "the column without a name"
            notes.append(f"{which} is {name}")
    return numbered, notes


def plan_layout(
    tables: Sequence[Described],
    options: ColumnOptions,
    ragged: frozenset[str] = frozenset(),
    base: Sequence[Column] = (),
) -> tuple[TableColumn, ...]:
    """Return the columns that tables make. `base`: those of the cache to which rows are appended.

    Raises ColumnProblems, and InputError for options that name other columns.
    """
    found = _match_columns(tables)
    chosen = _choose(found, options)
    _check_names(found, options, ragged)
    problems = []
    layout: list[TableColumn] = []
    kept = {column.name: column for column in base}
    for name in chosen:
        try:
            layout += _plan_column(name, found[name], tables, options, ragged, kept)
        except _Refused as refused:
            problems.append(refused.problem)
    # Floats, and times, are none to columns that aren't made of them, nor a comma to those that are left out.
    floats = {each.source for each in layout if each.column.dtype.startswith("float") or each.column.logical}
    commas = set(chosen) - options.dtypes.keys()

    def concerns(problem: Problem) -> bool:
        if not problem.column or problem.is_given:
            return not problem.column or problem.column in chosen
        return problem.column in (floats if problem.remedy[0] == "--dtype" else commas)

    problems[:0] = [problem for table in tables for problem in table.problems if concerns(problem)]
    if problems:
        raise ColumnProblems(tables[0].path, problems, layout)
    names = [each.column.name for each in layout]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"Each column needs a name of its own. Received: {', '.join(twice)} twice")
    if not layout:
        raise SourceError(f"{tables[0].path} has no columns that are kept. Leave out fewer")
    if base:
        places = {column.name: place for place, column in enumerate(base)}
        layout.sort(key=lambda each: places.get(each.column.name, len(places)))
    return tuple(layout)


class _Refused(Exception):
    def __init__(self, column: str, text: str, *remedy: str) -> None:
        self.problem = Problem(column, text, remedy)
        super().__init__(text)


def _match_columns(tables: Sequence[Described]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for table in tables:
        names = table.schema.names
        if not names:
            raise SourceError(f"{table.path} has no columns")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or "" in names:
            raise SourceError(
                f"{table.path} has several columns of one name: each column needs a name of its own. "
                f"Received: {', '.join(map(repr, twice or names))}"
            )
        for each in table.schema:
            known = found.setdefault(each.name, _Found(each.type))
            known.tables.append(table)
            wider = widen(known.kind, each.type)
            if wider is None and each.name in getattr(table, "folders", ()):
                wider = pa.large_utf8()  # such as of month=01 and month=10
            if wider is None:
                known.conflict = known.conflict or (
                    f"is {describe_type(known.kind)} in {known.tables[0].path} and "
                    f"{describe_type(each.type)} in {table.path}"
                )
            else:
                known.kind = wider
    return found


def widen(first: Any, second: Any) -> Any:
    """Return a type of Arrow that holds the values of both; None if there is none."""
    first, second = _decoded(first), _decoded(second)
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if is_text(first) and is_text(second):
        return pa.large_utf8()
    if is_bytes(first) and is_bytes(second):
        return pa.large_binary()
    numbers = [pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (first, second)]
    if all(numbers):
        if pa.types.is_floating(first) != pa.types.is_floating(second):
            return pa.float64()
        schemas = [pa.schema([("x", kind)]) for kind in (first, second)]
        try:
            return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
        except pa.ArrowException:
            return None
    both = (pa.types.is_date, pa.types.is_timestamp, pa.types.is_decimal)
    if all(any(check(kind) for check in both) for kind in (first, second)):
        try:
            schemas = [pa.schema([("x", kind)]) for kind in (first, second)]
            return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
        except pa.ArrowException:
            return None
    if is_list(first) and is_list(second):
        inner = widen(first.value_type, second.value_type)
        return None if inner is None else pa.large_list(inner)
    return None


def _decoded(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _choose(found: Mapping[str, _Found], options: ColumnOptions) -> list[str]:
    """Return the columns that are kept, in their order. Raises InputError."""
    chosen = list(found)
    if options.columns:
        chosen = []
        for given in options.columns:
            for name in [given] if _below(found, given) else [part.strip() for part in given.split(",")]:
                chosen += [each for each in _require("--columns", found, name) if each not in chosen]
    for name in sorted(options.without):
        dropped = set(_require("--without", found, name))
        chosen = [each for each in chosen if each not in dropped]
    return chosen


def _below(found: Mapping[str, _Found], name: str) -> list[str]:
    """Return the columns that a name means: that one, or those of a struct."""
    return [name] if name in found else [each for each in found if each.startswith(f"{name}.")]


def _require(flag: str, found: Mapping[str, _Found], name: str) -> list[str]:
    columns = _below(found, name)
    if not columns:
        raise InputError(
            f"{flag} must name a column of the sources: {', '.join(list(found)[:_SHOWN])}"
            f"{', ...' if len(found) > _SHOWN else ''}. Received: {name}"
            f"{suggest_name(name, found)}"
        )
    return columns


def _check_names(found: Mapping[str, _Found], options: ColumnOptions, ragged: frozenset[str]) -> None:
    named: Mapping[str, Collection[str]] = {
        "--rename": options.renames,
        "--dtype": options.dtypes,
        "--fill": options.fills,
        "--tensor": options.tensors,
        "--ragged": ragged,
        "--drop-nulls": [name for name in options.drop_nulls if name != ALL_COLUMNS],
    }
    for flag, names in named.items():
        for name in sorted(names):
            if name not in found:
                _require(flag, found, name)
                raise InputError(
                    f"{flag} must name one column. Received: {name}, a struct of "
                    f"{', '.join(_below(found, name))}"
                )


def _plan_column(
    name: str,
    found: _Found,
    tables: Sequence[Described],
    options: ColumnOptions,
    ragged: frozenset[str],
    base: Mapping[str, Column],
) -> Iterator[TableColumn]:
    """Yield the column of a cache that a column makes, and its mask. Raises _Refused."""
    dtype, fill = options.dtypes.get(name, ""), options.fills.get(name)
    renamed = options.renames.get(name, name)
    like = base.get(renamed)
    if found.conflict and not dtype:
        raise _Refused(name, found.conflict, "--dtype", f"{name}=str")
    column, form = _choose_column(
        name, renamed, found, dtype, options.tensors.get(name), name in ragged, like
    )
    is_dropped = bool({name, ALL_COLUMNS} & set(options.drop_nulls))
    may_be_nan = column.dtype.startswith("float") and not column.shape
    absent = len(tables) - len(found.tables)
    if absent and fill is None and not is_dropped:
        without = next(str(table.path) for table in tables if table not in found.tables)
        text = f"isn't in {without}{f' and {absent - 1} more' if absent > 1 else ''}"
        raise _Refused(name, text, *(("--without", name) if column.shape else fill_remedy(name, column)))
    # Rows that a condition leaves out may miss what they like; reading names what is missing in the others.
    if fill is None and not is_dropped and not may_be_nan and form != "json" and options.where is None:
        missing = sum(_count_missing(table, name) for table in found.tables)
        if missing:
            raise _Refused(name, describe_missing(missing), *fill_remedy(name, column))
    if fill == "null":
        zero = "" if column.dtype == TEXT or column.dtype.endswith(RAGGED) else "0"
        yield TableColumn(name, column, zero, form)
        yield TableColumn(name, Column(f"{renamed}{ENDING_OF_MASK}", "bool"), None, form, is_mask=True)
        return
    yield TableColumn(name, column, fill, form)


def describe_missing(count: int) -> str:
    return f"misses {format_count(count, 'value')}"


def fill_remedy(name: str, column: Column) -> tuple[str, ...]:
    """Return the option that takes a column of which values are missing."""
    return ("--drop-nulls", name) if column.shape else ("--fill", f"{name}=null")


def _count_missing(table: Described, name: str) -> int:
    if name in table.missing:
        return table.missing[name]
    values = table.sample.column(name)
    return int(values.null_count)


def _choose_column(
    name: str,
    renamed: str,
    found: _Found,
    dtype: str,
    tensor: tuple[str, tuple[int, ...]] | None,
    is_ragged: bool,
    like: Column | None,
) -> tuple[Column, str]:
    """Return the column that values make, and how texts become it. Raises _Refused."""
    kind = found.kind
    is_ragged = is_ragged or (not dtype and like is not None and like.dtype.endswith(RAGGED))
    if tensor is not None:
        return Column(renamed, *tensor), ""
    if "%" in dtype:
        return Column(renamed, "int64", (), "timestamp[us]"), dtype
    if dtype == "json":
        return Column(renamed, TEXT), "json"
    if dtype == "str" or (not dtype and like is not None and like.dtype == TEXT and _is_plain(kind)):
        if not _is_plain(kind):
            raise _Refused(
                name,
                f"is of {describe_type(kind)}, which --dtype json makes text of",
                "--dtype",
                f"{name}=json",
            )
        return Column(renamed, TEXT), ""
    if dtype in TIME_WORDS:
        return Column(renamed, "int64", (), "timestamp[us]" if dtype == "timestamp" else "date32[day]"), ""
    if dtype in DTYPES:
        shape = _find_shape(name, found, is_ragged) if is_list(kind) and not is_ragged else ()
        return Column(renamed, dtype + (RAGGED if is_ragged else ""), shape), ""
    if is_ragged:
        return Column(renamed, _ragged_dtype(name, kind) + RAGGED), ""
    if pa.types.is_null(kind):
        return Column(renamed, "float64"), ""
    if is_text(kind):
        return Column(renamed, TEXT), ""
    if like is not None and like.dtype == "float64" and pa.types.is_integer(kind):
        return Column(renamed, "float64"), ""
    if pa.types.is_temporal(kind):
        return Column(renamed, "int64", (), str(kind)), ""
    if pa.types.is_decimal(kind):
        return Column(renamed, "float64"), ""
    if pa.types.is_fixed_size_binary(kind):
        return Column(renamed, "uint8", (kind.byte_width,)), ""
    if is_bytes(kind):
        return Column(renamed, f"uint8{RAGGED}"), ""
    scalar = _scalar_of(kind)
    if scalar is None:
        raise _Refused(name, f"is of {describe_type(kind)}", "--dtype", f"{name}=json")
    return Column(renamed, scalar, _find_shape(name, found, is_ragged) if _has_shape(kind) else ()), ""


def _ragged_dtype(name: str, kind: Any) -> str:
    if is_bytes(kind):
        return "uint8"
    inner = _scalar_of(kind.value_type) if is_list(kind) and not is_list(kind.value_type) else None
    if inner is None:
        raise InputError(
            f"--ragged names a column of lists of numbers or bools. Received: {name} of "
            f"{describe_type(kind)}. "
            f"Keep it as text by --dtype {name}=json"
        )
    return inner


def _find_shape(name: str, found: _Found, is_ragged: bool) -> tuple[int, ...]:
    """Return the shape of the rows of a column of lists or tensors. Raises _Refused if they differ."""
    shapes: set[tuple[int, ...]] = set()
    for table in found.tables:
        column = table.sample.column(name)
        for values in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            shapes |= _list_shapes(values)
    if not shapes:
        raise _Refused(name, "has no list among its first rows", "--dtype", f"{name}=json")
    if len(shapes) == 1 and 0 not in (shape := next(iter(shapes))):
        return shape
    if any(len(shape) > 1 for shape in shapes):
        text = (
            f"has lists in lists of different lengths, such as {sorted(shapes)[0]} and {sorted(shapes)[-1]}"
        )
        raise _Refused(name, text, "--dtype", f"{name}=json")
    lengths = [length for (length,) in shapes]
    text = f"has lists of {min(lengths)} to {max(lengths)} values" if len(lengths) > 1 else "has empty lists"
    raise _Refused(name, text, "--ragged", name)


def _list_shapes(values: Any) -> set[tuple[int, ...]]:
    """Return the shapes of the rows of an array of lists, at most a few."""
    kind = values.type
    if pa.types.is_null(kind):  # of a file without values
        return set()
    if isinstance(kind, pa.FixedShapeTensorType):
        return {tuple(kind.shape)}
    if pa.types.is_dictionary(kind):
        return _list_shapes(values.dictionary_decode())
    if not is_list(kind):
        return {()}
    values = values.drop_null()
    lengths = (
        {kind.list_size}
        if pa.types.is_fixed_size_list(kind)
        else set(pa.compute.list_value_length(values).to_pylist())
    )
    inner = _list_shapes(values.flatten()) if is_list(kind.value_type) else {()}
    return {(length, *rest) for length in lengths for rest in (inner or {(0,)})}


def _has_shape(kind: Any) -> bool:
    return is_list(_decoded(kind)) or isinstance(kind, pa.FixedShapeTensorType)


def _scalar_of(kind: Any) -> str | None:
    """Return NumPy's dtype of the numbers or bools of a type, or of the lists of them; None if there is
    none."""
    if isinstance(kind, pa.BaseExtensionType):
        return _scalar_of(kind.value_type) if isinstance(kind, pa.FixedShapeTensorType) else None
    if pa.types.is_dictionary(kind) or is_list(kind):
        return _scalar_of(kind.value_type)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return str(kind.to_pandas_dtype()(0).dtype)
    return None


def _is_plain(kind: Any) -> bool:
    """Return whether Arrow writes values of a type as text."""
    kind = _decoded(kind)
    return not (
        is_list(kind) or pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType) or is_bytes(kind)
    )


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    kind = _decoded(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def is_bytes(kind: Any) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or kind == pa.binary_view()
    )


def describe_type(kind: Any) -> str:
    """Return a type of Arrow as users know it."""
    return "text" if is_text(kind) else f"type {kind}"
