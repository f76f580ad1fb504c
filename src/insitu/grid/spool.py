"""Rows on their way from sources to partitions: one file per column and destination, appended to.

Memory stays bounded whatever the size of the source, and each column of a partition ends up contiguous.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.grid.partition import ALIGNMENT, TEXT, Buffers, write_partition
from insitu.grid.sources.base import Block, raw_bytes
from insitu.paths import StagedPaths
from insitu.spec import Column


class Spools:
    """Spool files of `destinations` partitions to be. `rows[d]` counts what destination d has so far.

    Files are opened for each append: an import of a thousand partitions needs no thousand descriptors.
    """

    def __init__(self, staged: StagedPaths, columns: tuple[Column, ...], destinations: int) -> None:
        self.rows = np.zeros(destinations, dtype=np.int64)
        self._staged = staged
        self._columns = columns
        self._text_bytes = np.zeros((destinations, len(columns)), dtype=np.int64)
        self._sorted: dict[int, npt.NDArray[Any]] = {}

    def append(self, block: Block, destinations: npt.NDArray[np.int64] | None) -> None:
        """Adds the rows of `block`, row i to `destinations[i]`, or all to destination 0 where it is None."""
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
        for destination in np.flatnonzero(np.diff(bounds)):
            part = values[bounds[destination] : bounds[destination + 1]]
            _append(self._staged.spool(int(destination), index), part)

    def _append_text(self, index: int, texts: Any, bounds: npt.NDArray[np.int64]) -> None:
        offsets, data = text_buffers(texts)
        for destination in np.flatnonzero(np.diff(bounds)):
            ends = offsets[bounds[destination] : bounds[destination + 1] + 1]
            before = self._text_bytes[destination, index]
            _append(self._staged.spool(int(destination), index), data[ends[0] : ends[-1]])
            running = ends[1:] - ends[0] + before
            if not self.rows[destination]:
                running = np.concatenate(([0], running))
            _append(self._staged.spool(int(destination), index, "offsets"), running)
            self._text_bytes[destination, index] = running[-1]

    def seal(self, destination: int, target: Path) -> tuple[int, str]:
        """Writes `destination` as the partition `target` and drops its spools. Returns (bytes, checksum)."""
        rows = int(self.rows[destination])
        with contextlib.ExitStack() as stack:
            maps: list[mmap.mmap] = []
            buffers = {}
            for index, column in enumerate(self._columns):
                values = stack.enter_context(_mapped(self._staged.spool(destination, index), maps))
                offsets = None
                if column.dtype == TEXT:
                    path = self._staged.spool(destination, index, "offsets")
                    offsets = stack.enter_context(_mapped(path, maps))
                buffers[column.name] = Buffers(values, offsets)

            def drop_pages() -> None:
                for mapping in maps:
                    mapping.madvise(mmap.MADV_DONTNEED)

            sealed = write_partition(target, self._columns, rows, buffers, drop_pages)
            del buffers, values, offsets
        for index in range(len(self._columns)):
            self._staged.spool(destination, index).unlink(missing_ok=True)
            self._staged.spool(destination, index, "offsets").unlink(missing_ok=True)
        return sealed


def text_buffers(texts: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """(offsets, UTF-8 bytes) of an Arrow array of large strings, which may be a slice of a longer one."""
    _, offsets, data = texts.buffers()
    all_offsets = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return all_offsets, np.frombuffer(data if data is not None else b"", dtype=np.uint8)


def _append(path: Path, values: npt.NDArray[Any]) -> None:
    with path.open("ab", buffering=0) as file:
        rest = raw_bytes(values)
        while rest:
            rest = rest[file.write(rest) :]


@contextlib.contextmanager
def _mapped(path: Path, maps: list[mmap.mmap]) -> Iterator[Any]:
    """The bytes of a spool as an Arrow buffer, padded to ALIGNMENT."""
    if not path.exists():
        yield pa.py_buffer(bytes(ALIGNMENT))
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.truncate(size + -size % ALIGNMENT)
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    maps.append(mapping)
    yield pa.py_buffer(mapping)
