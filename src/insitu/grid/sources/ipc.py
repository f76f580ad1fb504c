"""Arrow IPC, the file and the stream format (Feather version 2 is the file format)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from insitu.base.errors import SourceError
from insitu.grid.sources.base import SourceOptions, rows_per_block
from insitu.grid.sources.huggingface import find_classes
from insitu.grid.sources.pictures import require_images, with_images
from insitu.grid.sources.tables import TableBatch, arrow_errors, roots_of, select_named
from insitu.grid.sources.urls import lies_behind_url

_FILE_MAGIC = b"ARROW1"
_FEATHER_1_MAGIC = b"FEA1"
_SAMPLE_ROWS = 1024
"""Rows whose form the columns follow from, and whose images are looked at to suggest a size."""
_FEW = 16
"""Rows of the sample if images are decoded."""


class IpcTable:
    format: ClassVar[str] = "arrow"
    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")
    counts_rows = False
    missing: ClassVar[Mapping[str, int]] = {}
    notes = ()
    problems = ()

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._images = options.images
        with path.open("rb") as file:
            magic = file.read(len(_FILE_MAGIC))
        if magic.startswith(_FEATHER_1_MAGIC):
            raise SourceError(f"{path} is of Feather's old version 1. Write it again as version 2 or Parquet")
        self._is_file = magic == _FILE_MAGIC
        with arrow_errors(path):
            first = next((batch for batch, *_ in self._batches() if batch.num_rows), None)
            if first is None:
                raise SourceError(f"{path} has no rows. Leave it out")
            require_images(first.schema, options.images, path)
            few = first.slice(0, _FEW if options.images else _SAMPLE_ROWS)
            self.sample = with_images(few, options.images, path)
            self.schema = self.sample.schema
            self.labels = find_classes(first.schema, path)
            self._row_bytes = max(
                first.nbytes / max(1, first.num_rows), self.sample.nbytes / max(1, self.sample.num_rows)
            )
            self.expected_rows = int(path.stat().st_size * first.num_rows / max(1, first.nbytes)) + 1

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        done = 0
        names = roots_of(wanted, self.schema)
        for batch, source_bytes, drop_pages in self._batches():
            rows = rows_per_block(max(batch.nbytes / max(1, batch.num_rows), self._row_bytes), block_bytes)
            kept = select_named(batch, names)
            for first in range(max(0, start - done), batch.num_rows, rows):
                part = with_images(kept.slice(first, rows), self._images, self.path, done + first)
                yield TableBatch(part, source_bytes, done + first + part.num_rows)
                drop_pages()
            done += batch.num_rows

    def _batches(self) -> Iterator[tuple[Any, int, Callable[[], None]]]:
        """Yield (batch, bytes of the file so far, a function that drops the pages read so far).

        Mapped, so that a batch larger than memory is no trouble.
        """
        if lies_behind_url(self.path):
            yield from self._streamed()
            return
        with self.path.open("rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)

        def drop_pages() -> None:
            mapping.madvise(mmap.MADV_DONTNEED)

        with pa.BufferReader(pa.py_buffer(mapping)) as file:
            if self._is_file:
                reader = pa.ipc.open_file(file)
                count = reader.num_record_batches
                for index in range(count):
                    yield _validated(reader.get_batch(index)), len(mapping) * (index + 1) // count, drop_pages
            else:
                for batch in pa.ipc.open_stream(file):
                    yield _validated(batch), file.tell(), drop_pages

    def _streamed(self) -> Iterator[tuple[Any, int, Callable[[], None]]]:
        """Yield the same of what can't be mapped."""
        size = self.path.stat().st_size
        with self.path.open("rb") as opened, pa.PythonFile(opened, "r") as stream:
            if self._is_file:
                reader = pa.ipc.open_file(stream)
                count = reader.num_record_batches
                for index in range(count):
                    yield _validated(reader.get_batch(index)), size * (index + 1) // count, _drop_nothing
            else:
                for batch in pa.ipc.open_stream(stream):
                    yield _validated(batch), opened.tell(), _drop_nothing


def _drop_nothing() -> None:
    pass


def _validated(batch: Any) -> Any:
    """Return `batch` after a look at each of its offsets and indices. Raises ArrowInvalid.

    Arrow itself follows those that point out of the file, which ends the process or copies the bytes there.
    """
    batch.validate(full=True)
    return batch
