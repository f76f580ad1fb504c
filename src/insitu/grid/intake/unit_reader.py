"""Reads one unit of the sources of an import: a file, or some rows of one, on whatever host sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError, SourceError
from insitu.base.typed import Count, convert_exactly
from insitu.grid.intake.import_rows import ImportRows, count_routed
from insitu.grid.intake.row_plan import RowPlan
from insitu.grid.intake.source_blocks import FileState, read_blocks, refuse_changed
from insitu.grid.sources import (
    Block,
    Source,
    SourceOptions,
    list_formats,
    open_sources,
    parse_source_file,
    skipped_of,
)

UNIT_BLOCK_BYTES = 8 << 20
"""Bytes of a source that are read at once."""

Counts = npt.NDArray[np.int64]
Append = Callable[[Block, "Counts | None"], None]


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive rows of one source."""

    #: Its number: units follow each other as their rows do.
    number: Count
    #: The path or URL of the source.
    path: str
    #: The source's format.
    format: str
    #: The state of the source's file when its header was read.
    state: FileState
    #: The first row, in the source.
    start: Count
    #: The row behind the last one; None: all that follow.
    stop: int | None
    #: The index of its first row among those of all sources, for the hash that chooses its partition.
    first_row: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Unit:
        """Return what `to_json` was called on. Raises InputError for anything else."""
        unit = convert_exactly("A unit", data, cls, InputError)
        known = list_formats()
        if unit.format not in known or not unit.path.strip():
            rule = f"A unit is a part of a file in one of the formats {', '.join(known)}"
            raise InputError(f"{rule}. Received: {unit.path!r:.200}, {unit.format!r:.20}")
        return unit


def encode_options(options: SourceOptions) -> dict[str, Any]:
    """Return the options by which sources are read, as JSON."""
    return dict(_plain(asdict(options)))


def _plain(value: Any) -> Any:
    """Return a value whose sets are lists."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return sorted(value) if isinstance(value, frozenset) else value


def decode_options(data: Any) -> SourceOptions:
    """Return what `encode_options` was given. Raises InputError for anything else."""
    return convert_exactly("Options of sources", data, SourceOptions, InputError)


def open_unit(unit: Unit, options: SourceOptions) -> Source:
    """Open the source of a unit. Raises SourceError, also if it isn't the file that was planned."""
    file = parse_source_file(unit.path)
    now = FileState.of(file)
    if (now.size, now.mtime_ns) != (unit.state.size, unit.state.mtime_ns):
        raise SourceError(
            f"{file} must be the same file for all hosts, and stay as it is. Received: one of {now.size} "
            f"bytes here, where {unit.state.size} were found before. Import files of one host with "
            f"`--read-on here`, or put them where all hosts see them"
        )
    (source,) = open_sources([(file, unit.format)], options)
    return source


def count_rows(unit: Unit, options: SourceOptions, on_read: Callable[[int], None]) -> int:
    """Return the rows of a unit, for which it is read as a whole. Raises SourceError."""
    rows = before = 0
    for block in read_blocks(open_unit(unit, options), UNIT_BLOCK_BYTES, unit.start):
        rows += block.rows
        on_read(block.source_bytes - before)
        before = block.source_bytes
    return rows


def read_unit(
    plan: RowPlan, unit: Unit, options: SourceOptions, append: Append, on_read: Callable[[int], None]
) -> tuple[Counts, list[str]]:
    """Give the rows of a unit to `append`, with their destinations. `on_read` gets the bytes of the file.

    Returns (the rows of each destination, what is wrong with each image that was passed over). Raises
    SourceError, and what `append` raises.
    """
    counts, import_rows = np.zeros(len(plan.destinations), np.int64), ImportRows(plan)
    file = parse_source_file(unit.path)
    before_reading = FileState.of(file)
    source, rows, before = open_unit(unit, options), 0, -1
    with contextlib.closing(read_blocks(source, UNIT_BLOCK_BYTES, unit.start)) as blocks:
        for given in blocks:
            cut = given if unit.stop is None else cut_block(given, unit.stop - unit.start - rows)
            block = import_rows.prepare(source, cut, unit.first_row + rows)
            destinations = import_rows.route(block, unit.first_row + rows)
            append(block, destinations)
            counts += count_routed(block, destinations, len(counts))
            rows += cut.rows
            on_read(0 if before < 0 else cut.source_bytes - before)
            before = cut.source_bytes
            if unit.stop is not None and rows >= unit.stop - unit.start:
                break
    refuse_changed(file, before_reading)
    if unit.stop is not None and rows != unit.stop - unit.start:
        raise SourceError(f"{file} must have {unit.stop} rows at least. Received: {unit.start + rows}")
    return counts, skipped_of(source)


def cut_block(block: Block, rows: int) -> Block:
    """Return the first `rows` rows of a block, or all if it has fewer."""
    if block.rows <= rows:
        return block
    columns = {
        name: np.ascontiguousarray(values[:rows]) if isinstance(values, np.ndarray) else values.slice(0, rows)
        for name, values in block.columns.items()
    }
    partitions = None if block.partitions is None else block.partitions[:rows]
    numbers = None if block.numbers is None else block.numbers[:rows]
    return replace(block, columns=columns, rows=rows, partitions=partitions, numbers=numbers)
