"""`insitu inspect`: what is in the sources of an import, and what an import would make of it. Nothing is "
"written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.spec import Column
from insitu.grid.importing.import_sources import (
    choose_reading,
    command_advised,
    refuse_for_format,
    write_command,
)
from insitu.grid.sources import (
    ArrowSource,
    ColumnProblems,
    Source,
    TableColumn,
    arrange_tables,
    counts_rows,
    describe_columns,
    find_sources,
    group_images,
    open_all,
    open_sources,
)
from insitu.options import ImportOptions

_EXAMPLES = 3
_MOST_SHOWN = 40
"""Characters of an example."""


@dataclass(frozen=True, slots=True)
class InspectedColumn:
    """A column of the sources, as its first rows show it."""

    #: Its name; fields of structs as in user.age.
    name: str
    #: Its type in the sources.
    type: str
    #: What it becomes in a cache, such as "calls: int64"; empty: it is left out, or can't be taken.
    becomes: str
    #: Values that are missing: of all rows if the files say so, else of the first ones.
    missing: int
    #: The least and the greatest value of the first rows, as text; empty: values have no order.
    minimum: str
    maximum: str
    #: Some values of the first rows, as text.
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in the sources of an import."""

    #: Their format.
    format: str
    #: How many files.
    files: int
    #: Bytes of all files.
    bytes: int
    #: How many rows they have.
    rows: int
    #: Whether it is exactly so many, and not about.
    has_exact_rows: bool
    columns: tuple[InspectedColumn, ...]
    #: What was inferred.
    notes: tuple[str, ...]
    #: What can't be taken as it is.
    problems: tuple[str, ...]
    #: The command that imports them.
    command: str

    def to_json(self) -> dict[str, Any]:
        """Return it in the form of docs/reference/json.md."""
        return asdict(self)


def inspect_files(options: ImportOptions) -> Inspection:
    """Return what is in the files that `options` name, of which the beginnings are read.

    Raises InputError, and SourceError for what can't be read at all.
    """
    single = find_sources(options.sources, options.format)
    files = group_images(single)
    refuse_for_format(options, files)
    reading = choose_reading(options, None)
    with command_advised(options, files):
        sources: Sequence[Source] = open_all(files, reading)
    problems: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()
    layout: tuple[TableColumn, ...] = ()
    tables = [source for source in sources if isinstance(source, ArrowSource)]
    if tables:
        try:
            arrange_tables(tables, reading)
            layout = tables[0].layout
        except ColumnProblems as error:
            problems, remedy, layout = tuple(map(str, error.problems)), error.remedy, error.layout
        names = dict.fromkeys(name for table in tables for name in table.schema.names)
        columns = tuple(_describe(name, tables, layout) for name in names)
    else:
        sources = open_sources(files, reading)
        columns = tuple(
            InspectedColumn(
                each.name, describe_columns((each,)).partition(" ")[2], _show(each), 0, "", "", ()
            )
            for each in sources[0].columns
        )
    return Inspection(
        sources[0].format,
        len(single),
        sum(file.stat().st_size for file, _ in single),
        sum(source.expected_rows for source in sources),
        all(map(counts_rows, sources)),
        columns,
        tuple(dict.fromkeys(note for source in sources for note in getattr(source, "notes", ()))),
        problems,
        write_command(options, *remedy),
    )


def _show(column: Column) -> str:
    kind = describe_columns((column,)).removeprefix(f"{column.name} ")
    return f"{column.name}: {kind}"


def _describe(name: str, tables: Sequence[ArrowSource], layout: Sequence[TableColumn]) -> InspectedColumn:
    first = next(table for table in tables if name in table.schema.names)
    values = first.sample.column(name)
    becomes = ", ".join(_show(to.column) for to in layout if to.source == name)
    missing = sum(
        table.missing.get(name, table.sample.column(name).null_count)
        for table in tables
        if name in table.schema.names
    )
    filled = values.drop_null()
    examples = [_shorten(filled[i].as_py()) for i in range(min(_EXAMPLES, len(filled)))]
    return InspectedColumn(name, str(values.type), becomes, missing, *_find_range(filled), tuple(examples))


def _find_range(values: Any) -> tuple[str, str]:
    kind = values.type
    ordered = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind)
    if not len(values) or not (ordered or pa.types.is_decimal(kind)):
        return "", ""
    found = pc.min_max(values).as_py()
    return _shorten(found["min"]), _shorten(found["max"])


def _shorten(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
