"""Sources of arrays, of which some columns are kept, or get other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.grid.sources.base import Block, Source, describe_columns
from insitu.grid.sources.column_options import ColumnOptions

_TAKEN = ("--columns", "--without", "--rename")


def select_columns(source: Source, options: ColumnOptions) -> Source:
    """Return a source with the columns that the user wants of it. Raises InputError for what a source of
    arrays doesn't take."""
    other = [flag for flag in options.given if flag not in _TAKEN]
    if other:
        raise InputError(
            f"{' and '.join(other)} {'is' if len(other) == 1 else 'are'} for tables: Parquet, CSV, Arrow "
            f"IPC and "
            f"JSON lines. Received: {source.path} of format {source.format}. Leave "
            f"{'it' if len(other) == 1 else 'them'} "
            f"out, or make a table of it"
        )
    if not options.given:
        return source
    known = {column.name: column for column in source.columns}
    listed = [
        name
        for each in options.columns
        for name in ([each] if each in known else map(str.strip, each.split(",")))
    ]
    for flag, names in (("--columns", listed), ("--without", options.without), ("--rename", options.renames)):
        if unknown := sorted(set(names) - known.keys()):
            raise InputError(
                f"{flag} must name a column of the sources: {describe_columns(source.columns)}. Received: "
                f"{', '.join(unknown)}"
            )
    kept = {name: options.renames.get(name, name) for name in listed or known if name not in options.without}
    if not kept or len(set(kept.values())) != len(kept):
        raise InputError(
            f"A cache has columns, each of a name of its own. Received: {', '.join(kept.values()) or 'none'}"
        )
    return SelectedSource(source, kept)


class SelectedSource:
    """Some columns of a source, under other names."""

    def __init__(self, source: Source, kept: Mapping[str, str]) -> None:
        """`kept`: column of the source -> its name."""
        self._source, self._kept = source, kept
        known = {column.name: column for column in source.columns}
        self.columns: tuple[Column, ...] = tuple(replace(known[name], name=to) for name, to in kept.items())
        self.format, self.path, self.expected_rows = source.format, source.path, source.expected_rows
        self.counts_rows = bool(getattr(source, "counts_rows", False))

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        for block in self._source.blocks(block_bytes, start):
            values: dict[str, Any] = {to: block.columns[name] for name, to in self._kept.items()}
            yield replace(block, columns=values)
