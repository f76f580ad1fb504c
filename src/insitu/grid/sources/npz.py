"""`.npz`: one column per array, read from the zip as they come, compressed or not."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import numpy.typing as npt

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources.base import Block, SourceOptions, check_column, rows_per_block
from insitu.grid.sources.npy import (
    ArrayHeader,
    array_blocks,
    read_header,
    refuse_truncated,
    values_of_column,
)
from insitu.grid.sources.urls import lies_behind_url

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""The errors of zipfile for a damaged, encrypted or unknown member."""


class NpzSource:
    format: ClassVar[str] = "npz"
    suffixes: ClassVar[tuple[str, ...]] = (".npz",)
    counts_rows: ClassVar[bool] = True

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        headers: dict[str, ArrayHeader] = {}
        with _readable(path), _archive(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    header = read_header(member, f"{path}:{name}")
                # The archive's own sizes may be false, too: it is only a first look.
                refuse_truncated(f"{path}:{name}", header, archive.getinfo(name).file_size - header.start)
                headers[name.removesuffix(".npy")] = header
        if not headers:
            raise SourceError(f"{path} holds no arrays")
        rows = {name: header.rows for name, header in headers.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise SourceError(f"{path}: all arrays must have the same number of rows. Received: {counts}")
        self._headers = headers
        self.expected_rows = next(iter(rows.values()))
        self.columns: tuple[Column, ...] = _columns(path, headers)

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        size = self.path.stat().st_size
        rows = rows_per_block(sum(header.row_bytes for header in self._headers.values()), block_bytes)
        done = 0
        with _readable(self.path), _archive(self.path) as archive, contextlib.ExitStack() as members:
            streams = []
            for column in self.columns:
                header = self._headers[column.name]
                member = _member(members, archive, column.name, header)
                streams.append(_checked_blocks(member, header, rows, f"{self.path}:{column.name}"))
            for parts in zip(*streams, strict=True):
                before, done = done, done + len(parts[0])
                if done <= start:  # what is packed can only be read from its beginning
                    continue
                values = {
                    column.name: values_of_column(part[max(0, start - before) :], column)
                    for column, part in zip(self.columns, parts, strict=True)
                }
                rows_left = done - max(start, before)
                yield Block(values, rows_left, size * done // self.expected_rows, done)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb")) if lies_behind_url(path) else path
        yield stack.enter_context(zipfile.ZipFile(file))


def _columns(path: Path, headers: Mapping[str, ArrayHeader]) -> tuple[Column, ...]:
    """Return the columns of all arrays. Raises SourceError with what is wrong with each."""
    columns, problems = [], []
    for name, header in headers.items():
        try:
            columns.append(check_column(path, name, header.dtype, header.shape[1:]))
        except SourceError as error:
            problems.append(error.message)
    if problems:
        raise SourceError("\n".join(problems))
    return tuple(columns)


def _checked_blocks(
    member: IO[bytes], header: ArrayHeader, rows: int, path: str
) -> Iterator[npt.NDArray[Any]]:
    yield from array_blocks(member, header, rows, path)
    member.read(1)  # meets the end, at which zipfile compares the checksum


def _member(
    members: contextlib.ExitStack, archive: zipfile.ZipFile, name: str, header: ArrayHeader
) -> IO[bytes]:
    """Open an array's bytes, at its first row. One in column order needs random access: it is unpacked into
    a temporary file that has no name. Raises SourceError if it is shorter than its header says or there is no
    room for it.
    """
    entry = name if name in archive.namelist() else f"{name}.npy"
    member = members.enter_context(archive.open(entry))
    if header.fortran:
        size = header.start + header.value_bytes
        room = shutil.disk_usage(tempfile.gettempdir()).free
        if size > room:
            raise SourceError(
                f"{archive.filename}:{name} is in column order, so its {size} bytes are unpacked to "
                f"{tempfile.gettempdir()} first, where {room} are free. Set TMPDIR to a folder with more "
                f"room, or save the array in row order"
            )
        unpacked = members.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (it is one)
        _unpack(member, unpacked, size, f"{archive.filename}:{name}")
        return cast("IO[bytes]", unpacked)
    member.read(header.start)
    return member


def _unpack(member: IO[bytes], target: IO[bytes], size: int, path: str) -> None:
    """Copy the first `size` bytes of a member, never more: what follows the values isn't looked at."""
    left = size
    while left:
        part = member.read(min(left, 1 << 20))
        if not part:
            raise SourceError(f"{path} is truncated: it has {size - left} of {size} bytes. Fetch it again")
        target.write(part)
        left -= len(part)
    # Meets the end, at which zipfile compares the checksum.
    member.read(1)
    target.flush()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise SourceError(
            f"{path} is no whole .npz file ({error}). It may be truncated; fetch it again"
        ) from error
