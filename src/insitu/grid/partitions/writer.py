"""Writes partitions block by block, each byte once, and takes their checksums on the way."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from insitu.grid.partitions.checksum import checksum_text, combined
from insitu.grid.partitions.format import (
    TEXT,
    BlockMark,
    arrow_schema,
    body_alignment,
    column_sums,
    make_batch,
    make_mark,
    write_options,
)
from insitu.spec import Column

_MOST_PIECES = 512
"""Pieces of memory that are given to the system at once; it takes 1,024 at most."""


class PartitionWriter:
    """A new partition that grows by whole blocks.

    No file is open between calls, since an import may write thousands of partitions.
    """

    def __init__(self, path: Path, columns: tuple[Column, ...]) -> None:
        """The file at `path`, which must not be there, is made by the first `write`, or by `close`."""
        self._path = path
        self._columns = columns
        self._sink = _PieceSink()
        self._file = pa.PythonFile(self._sink, "w")
        self._writer = pa.ipc.new_file(self._file, arrow_schema(columns), options=write_options())
        self._blocks = 0
        self._first_body = 0
        self._crc32 = 0

    def write(self, rows: int, values: Mapping[str, Any]) -> None:
        """Append a block of `rows` rows, one at least. `values` are as for `make_batch`. Raises OSError."""
        sums = column_sums(self._columns, values)
        mark = BlockMark(self._blocks, tuple(crc32 for crc32, _ in sums))
        padding = 0
        if self._blocks:
            body = self._sink.position + _metadata_bytes(self._columns)
            padding = -(body - self._first_body) % body_alignment(self._columns)
        batch = make_batch(self._columns, rows, values)
        self._writer.write_batch(batch, custom_metadata=make_mark(mark, padding))
        if not self._blocks:
            self._first_body = self._sink.body_start
        self._blocks += 1
        self._append(sums)

    def close(self) -> tuple[int, str]:
        """Complete the file, make it survive a power cut, and return (bytes, checksum). Raises OSError."""
        self._writer.close()
        self._append([])
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return self._sink.position, checksum_text(self._crc32)

    def _append(self, column_sums: Sequence[tuple[int, int]]) -> None:
        """Append what Arrow has written: a body with these (CRC-32, bytes) by column, or none."""
        pieces, body = self._sink.take_pieces()
        for piece in pieces[:body] if column_sums else pieces:
            self._crc32 = zlib.crc32(piece, self._crc32)
        for crc32, size in column_sums:
            self._crc32 = combined(self._crc32, crc32, size)
        with self._path.open("ab" if self._sink.appended else "xb", buffering=0) as file:
            for start in range(0, len(pieces), _MOST_PIECES):
                _write_all(file.fileno(), pieces[start : start + _MOST_PIECES])
        self._sink.appended = True


def _write_all(descriptor: int, pieces: list[memoryview]) -> None:
    while pieces:
        written = os.writev(descriptor, pieces)
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if pieces and written:
            pieces[0] = pieces[0][written:]


class _PieceSink:
    """Keeps the pieces that Arrow writes, without copying the buffers of columns."""

    closed = False

    def __init__(self) -> None:
        self.position = 0
        self.body_start = 0
        self.appended = False
        self._pieces: list[memoryview] = []
        self._body = -1

    def take_pieces(self) -> tuple[list[memoryview], int]:
        """Return the pieces since the last call, and the number of the first that belongs to a body."""
        taken = self._pieces, self._body
        self._pieces, self._body = [], -1
        return taken

    def write(self, data: Any) -> int:
        if isinstance(data, pa.Buffer):
            if self._body < 0:
                self._body, self.body_start = len(self._pieces), self.position
            piece = memoryview(data).cast("B")
        else:
            piece = memoryview(bytes(data))
        self._pieces.append(piece)
        self.position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@functools.lru_cache(maxsize=64)
def _metadata_bytes(columns: tuple[Column, ...]) -> int:
    """Return the bytes between the beginning of a block's message and its body, without padding."""
    values = {
        column.name: pa.array([""], pa.large_utf8())
        if column.dtype == TEXT
        else np.zeros((1, *column.shape), column.dtype)
        for column in columns
    }
    sink = _PieceSink()
    with pa.PythonFile(sink, "w") as file:
        writer = pa.ipc.new_file(file, arrow_schema(columns), options=write_options())
        for number in range(2):
            before = sink.position
            sink.take_pieces()
            batch = make_batch(columns, 1, values)
            writer.write_batch(batch, custom_metadata=make_mark(BlockMark(number, (0,) * len(columns)), 0))
        size = sink.body_start - before
        writer.close()
    return size
