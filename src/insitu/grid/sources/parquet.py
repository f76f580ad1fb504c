"""Parquet: small row groups in several threads, large ones batch by batch."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq

from insitu.base.errors import SourceError
from insitu.grid.sources.base import SourceOptions, rows_per_block
from insitu.grid.sources.huggingface import find_classes
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.pictures import require_images, with_images
from insitu.grid.sources.tables import TableBatch, arrow_errors, roots_of
from insitu.grid.sources.urls import arrow_input

_WHOLE_GROUP_BYTES = 16 << 20
"""Bytes of a row group up to which it is decoded as a whole, while others are."""
_SAMPLE_ROWS, _SAMPLE_BYTES = 1024, 1 << 20
"""Rows, and about how many bytes of them, that are read to find out how large and of which form rows are."""
_FEW = 16
"""Rows of these if images are decoded."""
_MOST_BUFFER_BYTES, _BUFFERS_BYTES = 1 << 20, 32 << 20
"""Bytes that are read at once from one column, and from all columns of a row group together."""


class ParquetTable:
    format: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    counts_rows: ClassVar[bool] = True
    notes = ()
    problems = ()

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._images = options.images
        with arrow_errors(path), pq.ParquetFile(arrow_input(path)) as file:
            self.expected_rows = file.metadata.num_rows
            if not self.expected_rows:
                raise SourceError(f"{path} has no rows. Leave it out")
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._group_rows = [group.num_rows for group in groups]
            self._row_bytes = sum(group.total_byte_size for group in groups) / self.expected_rows
            most = _FEW if options.images else _SAMPLE_ROWS
            few = min(most, rows_per_block(self._row_bytes, _SAMPLE_BYTES))
            first = next(file.iter_batches(batch_size=few), None)
            if first is None or sum(self._group_rows) != self.expected_rows:
                raise SourceError(
                    f"{path} is damaged: its footer counts {self.expected_rows} rows, and its row groups "
                    f"{sum(self._group_rows)}{'' if first else ', but they hold none'}. Fetch it again"
                )
            require_images(first.schema, options.images, path)
            first = with_images(first, options.images, path)
            self.sample, self.schema = first, first.schema
            # The unpacked content of a dictionary may be much larger than the file, as may images.
            self._row_bytes = max(self._row_bytes, first.nbytes / max(1, first.num_rows))
            self.missing = _count_missing(groups)
            self.labels = find_classes(file.schema_arrow, path)

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        size = self.path.stat().st_size
        names = roots_of(wanted, self.schema)
        rows = rows_per_block(self._row_bytes, block_bytes)
        whole = len(self._group_rows) > 1 and max(self._group_rows) * self._row_bytes <= _WHOLE_GROUP_BYTES
        groups, done = self._groups_from(start)
        read = _read_groups if whole else _stream_groups
        with contextlib.closing(read(self.path, names, groups, rows)) as batches:
            for batch in batches:
                before, done = done, done + batch.num_rows
                if done <= start:
                    continue
                part = batch.slice(max(0, start - before))
                part = with_images(part, self._images, self.path, done - part.num_rows)
                yield TableBatch(part, size * done // self.expected_rows, done)
        if done != self.expected_rows:
            raise SourceError(
                f"{self.path} is damaged: its footer counts {self.expected_rows} rows. Received: {done}. "
                f"Fetch it again"
            )

    @property
    def row_starts(self) -> list[int]:
        """The first row of each row group, at which reading can begin without decoding rows before."""
        return [0, *itertools.accumulate(self._group_rows[:-1])]

    def _groups_from(self, start: int) -> tuple[list[int], int]:
        """Return the row groups that hold row `start` and those after it, and the rows before them."""
        before = 0
        for number, rows in enumerate(self._group_rows):
            if before + rows > start:
                return list(range(number, len(self._group_rows))), before
            before += rows
        return [], before


def _count_missing(groups: list[Any]) -> dict[str, int]:
    """Return how many values of columns without lists are missing, by the statistics of all row groups."""
    found: dict[str, int] = {}
    unknown: set[str] = set()
    for group in groups:
        for number in range(group.num_columns):
            column = group.column(number)
            name, statistics = column.path_in_schema, column.statistics
            if column.num_values != group.num_rows or statistics is None or not statistics.has_null_count:
                unknown.add(name)
            else:
                found[name] = found.get(name, 0) + statistics.null_count
    return {name: count for name, count in found.items() if name not in unknown}


def _open(path: Path, columns: int) -> Any:
    """Open a file, of which so many columns are read."""
    size = max(1 << 14, min(_MOST_BUFFER_BYTES, _BUFFERS_BYTES // max(1, columns)))
    # Arrow's pre-buffering would read ahead the whole file into memory.
    return pq.ParquetFile(arrow_input(path), buffer_size=size, pre_buffer=False)


def _stream_groups(path: Path, names: list[str], groups: list[int], rows: int) -> Generator[Any, None, None]:
    with _open(path, len(names)) as file:
        yield from file.iter_batches(batch_size=rows, row_groups=groups, columns=names)


def _read_groups(path: Path, names: list[str], groups: list[int], rows: int) -> Generator[Any, None, None]:
    """Yield the batches of row groups, each decoded by one of several threads."""
    with contextlib.ExitStack() as stack:
        files = threading.local()
        lock = threading.Lock()

        def read(group: int) -> Any:
            if not hasattr(files, "own"):
                with lock:
                    files.own = stack.enter_context(_open(path, len(names)))
            return files.own.read_row_group(group, columns=names, use_threads=False)

        with contextlib.closing(map_ordered(read, groups)) as tables:
            for table in tables:
                yield from table.combine_chunks().to_batches(max_chunksize=rows)
