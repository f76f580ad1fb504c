"""`.npy`: one array, whose first axis counts rows."""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT
from insitu.grid.sources.base import Block, SourceOptions, check_column, native, raw_bytes, rows_per_block
from insitu.grid.sources.urls import lies_behind_url

_WORTH_DROPPING = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
"""Bytes of a file from which on the system's cache needn't keep what has been read."""


_Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
_PARSING = threading.Lock()
_PARSE_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The header of a `.npy`."""

    #: Lengths of its axes, in elements; rows are the first.
    shape: tuple[int, ...]
    #: The dtype of its values, with their byte order.
    dtype: np.dtype[Any]
    #: Whether the values are in column order.
    fortran: bool
    #: The byte at which the values begin.
    start: int

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        return self.rows * self.row_bytes


def read_header(file: IO[bytes], path: object) -> ArrayHeader:
    """Read the header at the start of `file`. `path` is for the messages. Raises SourceError."""
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = _parse_alone(read, file)
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python, so a false one can raise anything
        raise SourceError(f"{path} is not a whole .npy file: {error}") from error
    if any(type(length) is not int or length < 0 for length in shape):
        raise SourceError(
            f"{path} is no .npy file that NumPy has written: its header's shape must be of whole numbers, at "
            f"least 0. Received: {shape}. Fetch it again"
        )
    if not shape:
        raise SourceError(f"{path} holds a single value. Rows are counted by the first axis of an array")
    if shape[0] == 0:
        raise SourceError(f"{path} has no rows (its shape is {shape}). Leave it out")
    return ArrayHeader(shape, dtype, bool(fortran) and len(shape) > 1, file.tell())


def _parse_alone(read: Callable[[IO[bytes]], _Header], file: IO[bytes]) -> _Header:
    """Return the header that `read` finds in `file`, while no other thread parses one.

    NumPy parses it as Python. Until 3.12 the interpreter counts a syntax tree's depth for all threads in one
    place, so two that parse at once can get a SystemError (https://github.com/python/cpython/issues/106905).
    Others than this module parse as well, so one more attempt is made after such an error.
    """
    start = file.tell()
    with _PARSING:
        for _ in range(_PARSE_ATTEMPTS):
            try:
                return read(file)
            except SystemError:
                file.seek(start)
        return read(file)


def refuse_truncated(path: object, header: ArrayHeader, held: int) -> None:
    """Raise SourceError if a header announces more values than the `held` bytes behind it."""
    if held < header.value_bytes:
        raise SourceError(
            f"{path} is truncated: its header promises {header.value_bytes} bytes of values (shape "
            f"{header.shape}, {header.dtype}), it has {held}. Fetch it again"
        )


def read_values(data: bytes, place: str) -> npt.NDArray[Any]:
    """Return the numbers of a `.npy` that is in memory, in native byte order. Raises SourceError."""
    header = read_header(io.BytesIO(data), place)
    refuse_truncated(place, header, len(data) - header.start)
    if header.dtype.kind == "U":
        raise SourceError(f"{place} must hold numbers. Received: texts ({header.dtype}). Name them .txt")
    check_column(place, "npy", header.dtype, header.shape)
    count = math.prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.start)
    values: npt.NDArray[Any] = native(flat.reshape(header.shape, order="F" if header.fortran else "C"))
    return values


class NpySource:
    format: ClassVar[str] = "npy"
    suffixes: ClassVar[tuple[str, ...]] = (".npy",)
    counts_rows: ClassVar[bool] = True

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        with path.open("rb") as file:
            self._header = header = read_header(file, path)
            held = file.seek(0, 2) - header.start
        column = check_column(path, options.column, header.dtype, header.shape[1:])
        self.columns: tuple[Column, ...] = (column,)
        self.expected_rows = header.rows
        refuse_truncated(path, header, held)
        if header.fortran and lies_behind_url(path):
            raise SourceError(
                f"An array behind a URL must be in row order. Received: {path}, in column order. Save it "
                f"with numpy.save(file, numpy.ascontiguousarray(array)), or give the path of a copy"
            )

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        header, (column,) = self._header, self.columns
        rows = rows_per_block(header.row_bytes, block_bytes)
        with self.path.open("rb", buffering=0) as file:
            done, dropped = start, 0
            file.seek(header.start + start * header.row_bytes)
            for values in array_blocks(file, header, rows, self.path, start):
                done += len(values)
                source_bytes = header.start + header.value_bytes * done // header.rows
                if header.value_bytes > _WORTH_DROPPING and not lies_behind_url(self.path):
                    # It won't be there for a second reader anyway, and others keep their place.
                    os.posix_fadvise(file.fileno(), dropped, source_bytes - dropped, os.POSIX_FADV_DONTNEED)
                    dropped = source_bytes
                yield Block({column.name: values_of_column(values, column)}, len(values), source_bytes, done)


def values_of_column(values: npt.NDArray[Any], column: Column) -> Any:
    """Return `values` in the form that a Block holds."""
    if column.dtype != TEXT:
        return native(values)
    texts = pa.array(values.tolist(), pa.large_utf8())
    # Half of a surrogate pair is a text of NumPy's, and none of UTF-8's.
    texts.validate(full=True)
    return texts


def array_blocks(
    file: IO[bytes], header: ArrayHeader, rows: int, path: object, first: int = 0
) -> Iterator[npt.NDArray[Any]]:
    """Yield the values of a `.npy` from row `first` on, `rows` rows at a time.

    `file` stands at that row. It is only read forward, except in column order, when it is mapped: zipfile no
    longer compares the checksum of a member in which somebody has sought.
    """
    if header.fortran:
        yield from _column_major_blocks(file, header, rows, first)
        return
    for start in range(first, header.rows, rows):
        block = np.empty((min(rows, header.rows - start), *header.shape[1:]), header.dtype)
        rest = raw_bytes(block)
        while rest:
            size = file.readinto(rest)  # type: ignore[attr-defined]
            if not size:
                raise SourceError(f"{path} is truncated: row {start} and what follows is not all there")
            rest = rest[size:]
        yield block


def _column_major_blocks(
    file: IO[bytes], header: ArrayHeader, rows: int, first: int
) -> Iterator[npt.NDArray[Any]]:
    mapped = np.memmap(file, header.dtype, "r", header.start, header.shape, order="F")
    for start in range(first, header.rows, rows):
        yield np.ascontiguousarray(mapped[start : start + rows])
