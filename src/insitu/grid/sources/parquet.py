"""Parquet, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet as pq

from insitu.errors import SourceError
from insitu.grid.partitions import row_bytes
from insitu.grid.sources.base import Block, SourceOptions, rows_per_block
from insitu.grid.sources.tables import arrow_errors, columns_of_batch, values_of_batch
from insitu.spec import Column


class ParquetSource:
    format: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        with arrow_errors(path), pq.ParquetFile(path) as file:
            self._rows = file.metadata.num_rows
            if not self._rows:
                raise SourceError(f"{path} has no rows. Leave it out")
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._row_bytes = sum(group.total_byte_size for group in groups) / self._rows
            self.columns: tuple[Column, ...] = columns_of_batch(next(file.iter_batches(batch_size=1)), path)

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        size, done = self.path.stat().st_size, 0
        width = max(self._row_bytes, sum(row_bytes(column) for column in self.columns))
        rows = rows_per_block(width, block_bytes)
        # Arrow's pre-buffering would read ahead the whole file into memory.
        opened = partial(pq.ParquetFile, buffer_size=1 << 20, pre_buffer=False)
        with arrow_errors(self.path), opened(self.path) as file:
            for batch in file.iter_batches(batch_size=rows):
                done += batch.num_rows
                values = values_of_batch(batch, self.columns, self.path)
                yield Block(values, batch.num_rows, size * done // self._rows)
