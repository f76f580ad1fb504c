"""Rows on their way from sources to partitions: one file per column and destination, appended to.

Memory stays bounded whatever the size of the source, each column of a partition ends up contiguous, and
the widest column, which is most of the bytes of images and the like, is written once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.grid.partition import (
    ALIGNMENT,
    TEXT,
    Buffers,
    body_layout,
    file_order,
    row_bytes,
    write_partition,
)
from insitu.grid.sources import Block, raw_bytes
from insitu.paths import StagedPaths
from insitu.spec import Column

_LIBC = ctypes.CDLL(None)


class Spools:
    """Spool files of partitions to be, one destination for each of `targets`, the files that they become.

    The widest column is appended to the target itself, behind the room for the file's header; the others
    to spools of their own, which follow it when the target is sealed. `rows[d]` counts what destination d
    has so far. Files are opened for each append: a thousand partitions need no thousand descriptors.
    """

    def __init__(self, staged: StagedPaths, columns: tuple[Column, ...], targets: Sequence[Path]) -> None:
        self.rows = np.zeros(len(targets), dtype=np.int64)
        self._staged = staged
        self._columns = columns
        self._targets = targets
        self._text_bytes = np.zeros((len(targets), len(columns)), dtype=np.int64)
        self._sorted: dict[int, npt.NDArray[Any]] = {}
        widest = file_order(columns)[0]
        self._main = None if widest.dtype == TEXT else columns.index(widest)
        self._main_start = body_layout(columns)[1]
        self._main_crc32 = [0] * len(targets)

    def append(self, block: Block, destinations: npt.NDArray[np.int64] | None) -> None:
        """Add the rows of `block`, row i to `destinations[i]`, or all to destination 0 where it is None."""
        if destinations is None:
            order, counts = None, np.array([block.rows])
        else:
            narrow = destinations.astype(np.uint16 if len(self.rows) <= 1 << 16 else np.int64)
            order = np.argsort(narrow, kind="stable")
            counts = np.bincount(destinations, minlength=len(self.rows))
        bounds = np.concatenate(([0], np.cumsum(counts)))
        for index, column in enumerate(self._columns):
            values = block.columns[column.name]
            if column.dtype == TEXT:
                self._append_text(index, values if order is None else values.take(pa.array(order)), bounds)
            else:
                self._append_values(index, self._reorder(index, values, order), bounds)
        self.rows += counts

    def _reorder(
        self, index: int, values: npt.NDArray[Any], order: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[Any]:
        if order is None:
            return np.ascontiguousarray(values)
        room = self._sorted.get(index)
        if room is None or len(room) < len(values):
            room = self._sorted[index] = np.empty(values.shape, values.dtype)
        return np.take(values, order, axis=0, out=room[: len(values)], mode="clip")

    def _append_values(self, index: int, values: npt.NDArray[Any], bounds: npt.NDArray[np.int64]) -> None:
        for destination in np.flatnonzero(np.diff(bounds)).tolist():
            part = values[bounds[destination] : bounds[destination + 1]]
            if index == self._main:
                crc32 = self._main_crc32[destination]
                self._main_crc32[destination] = zlib.crc32(raw_bytes(part), crc32)
                _append(self._targets[destination], part, self._main_start)
            else:
                _append(self._staged.spool(destination, index), part)

    def _append_text(self, index: int, texts: Any, bounds: npt.NDArray[np.int64]) -> None:
        offsets, data = text_buffers(texts)
        for destination in np.flatnonzero(np.diff(bounds)).tolist():
            ends = offsets[bounds[destination] : bounds[destination + 1] + 1]
            before = self._text_bytes[destination, index]
            _append(self._staged.spool(destination, index), data[ends[0] : ends[-1]])
            running = ends[1:] - ends[0] + before
            if not self.rows[destination]:
                running = np.concatenate(([0], running))
            _append(self._staged.spool(destination, index, "offsets"), running)
            self._text_bytes[destination, index] = running[-1]

    def seal(self, destination: int) -> tuple[int, str]:
        """Complete the target of `destination` and drop its spools. Returns (bytes, checksum)."""
        target, rows = self._targets[destination], int(self.rows[destination])
        mapped: list[Any] = []
        buffers: dict[str, Buffers] = {}
        in_place = None
        for index, column in enumerate(self._columns):
            if index == self._main and rows:
                values, in_place = self._sealed_main(destination, rows * row_bytes(column))
                buffers[column.name] = Buffers(values)
                continue
            values = _map(self._staged.spool(destination, index), mapped)
            path = self._staged.spool(destination, index, "offsets")
            buffers[column.name] = Buffers(values, _map(path, mapped) if column.dtype == TEXT else None)

        def drop_pages() -> None:
            for buffer in mapped:
                _advise(buffer, mmap.MADV_DONTNEED)

        sealed = write_partition(target, self._columns, rows, buffers, in_place=in_place, written=drop_pages)
        for index in range(len(self._columns)):
            self._staged.spool(destination, index).unlink(missing_ok=True)
            self._staged.spool(destination, index, "offsets").unlink(missing_ok=True)
        return sealed

    def _sealed_main(self, destination: int, size: int) -> tuple[Any, int]:
        """Return (buffer, CRC-32) of the widest column with its padding, which is written."""
        padding = bytes(-size % ALIGNMENT)
        crc32 = zlib.crc32(padding, self._main_crc32[destination])
        with self._targets[destination].open("r+b") as file:
            file.truncate(self._main_start + size + len(padding))
            mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return pa.py_buffer(mapping).slice(self._main_start), crc32


def text_buffers(texts: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return (offsets, UTF-8 bytes) of an Arrow array of large strings, or of a slice of one."""
    _, offsets, data = texts.buffers()
    all_offsets = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return all_offsets, np.frombuffer(data if data is not None else b"", dtype=np.uint8)


def _append(path: Path, values: npt.NDArray[Any], start: int = 0) -> None:
    """Append to `path`, or write at `start` where that is beyond its end."""
    with path.open("ab", buffering=0) as file:
        if file.tell() < start:
            file.truncate(start)
        rest = raw_bytes(values)
        while rest:
            rest = rest[file.write(rest) :]


def _map(path: Path, mapped: list[Any]) -> Any:
    """Return the bytes of a spool as an Arrow buffer, padded to ALIGNMENT; zeros if there are none.

    Adds the buffer to `mapped`. Arrow's mappings, unlike Python's, keep no descriptor of the file open, of
    which a partition of thousands of columns would need more than a process may have.
    """
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return pa.py_buffer(bytes(ALIGNMENT))
    os.truncate(path, size + -size % ALIGNMENT)
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()
    _advise(buffer, mmap.MADV_SEQUENTIAL)
    mapped.append(buffer)
    return buffer


def _advise(buffer: Any, advice: int) -> None:
    """Tell the kernel how a whole mapping is used. A refusal is of no consequence."""
    _LIBC.madvise(ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.size), advice)
