"""The frame of TFRecord files: records with their lengths, each with a checksum. Gzip is unpacked on the way.

A record is its length (8 bytes), the checksum of that (4), its bytes, and their checksum (4): CRC-32C,
rotated
by 15 bits with a constant added, all little-endian.
"""

from __future__ import annotations

import contextlib
import gzip
import struct
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError
from insitu.base.process.processes import read_available_bytes
from insitu.grid.sources.packing import skip_bytes

MOST_RECORD_BYTES = 2**31 - 1
"""A message of protobuf has no more."""
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_AROUND = _HEADER.size + _CHECKSUM.size
_LARGE_BYTES = 64 << 20
_COPIES = 4
"""How often a record is in memory at once: as it comes, as a chunk, while its checksum is computed, and as
columns."""
_PIECE_BYTES = 4 << 20
"""Bytes that are read at once: a false length of a record takes no memory before they have come."""


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Whole records in a row."""

    #: The records with their frames.
    data: bytes
    #: The offset of each record's bytes in `data`: int64[records].
    starts: npt.NDArray[np.int64]
    #: Bytes of each record: int64[records].
    lengths: npt.NDArray[np.int64]
    #: The number of the first record in the file; None if reading began further on.
    first: int | None
    #: The byte of the unpacked file at which `data` begins.
    start: int
    #: Bytes of the file that have been read.
    source_bytes: int

    @property
    def end(self) -> int:
        """The byte of the unpacked file at which `data` ends."""
        return self.start + len(self.data)

    def place(self, record: int) -> str:
        """Return the place of a record of the chunk in the file, for messages."""
        byte = self.start + int(self.starts[record]) - _HEADER.size
        return f"record {'' if self.first is None else f'{self.first + record} '}at byte {byte}"


def mask_checksum(crc: int) -> int:
    """Return a CRC-32C as TFRecord files hold it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_packed(path: Path) -> bool:
    """Return whether a file is packed by gzip. Raises SourceError if it is packed otherwise."""
    with path.open("rb") as file:
        beginning = file.read(_HEADER.size)
    if len(beginning) == _HEADER.size and _length_is_right(beginning, 0):
        return False
    if beginning[:2] == b"\x1f\x8b":
        return True
    if beginning[:1] == b"\x78" and len(beginning) > 1 and int.from_bytes(beginning[:2], "big") % 31 == 0:
        raise SourceError(
            f"{path} must be plain or packed by gzip. Received: a file packed by zlib. Write it again with "
            f"compression_type='GZIP', or unpack it first"
        )
    return False


def _length_is_right(data: bytes | bytearray, at: int) -> bool:
    (checksum,) = _CHECKSUM.unpack_from(data, at + 8)
    return bool(mask_checksum(google_crc32c.value(bytes(data[at : at + 8]))) == checksum)


def read_chunks(
    path: Path, packed: bool, chunk_bytes: int, start: int = 0
) -> Generator[RecordChunk, None, None]:
    """Yield the records from byte `start` of the unpacked file on, in chunks of about `chunk_bytes`.

    Lengths have been compared with their checksums, records haven't. Raises SourceError.
    """
    with _opened(path, packed) as (stream, file):
        first = 0 if start == 0 else None
        skip_bytes(stream, start, packed)
        buffer = bytearray()
        while True:
            piece = stream.read(min(chunk_bytes, _PIECE_BYTES))
            buffer += piece
            starts, lengths, end = _walk(buffer, path, packed, first, start)
            if starts:
                found = np.array(starts, np.int64), np.array(lengths, np.int64)
                yield RecordChunk(bytes(buffer[:end]), *found, first, start, file.tell())
                del buffer[:end]
                start, first = start + end, None if first is None else first + len(starts)
            if not piece:
                if buffer:
                    raise _truncated(path, packed, buffer, first, start)
                return


def _walk(
    buffer: bytearray, path: Path, packed: bool, first: int | None, start: int
) -> tuple[list[int], list[int], int]:
    """Return (starts of whole records, their lengths, the end of the last one). Raises SourceError."""
    starts: list[int] = []
    lengths: list[int] = []
    at, size = 0, len(buffer)
    while size - at >= _HEADER.size:
        length, _ = _HEADER.unpack_from(buffer, at)
        if not _length_is_right(buffer, at) or length > MOST_RECORD_BYTES:
            number = "" if first is None else f"{first + len(starts)} "
            raise SourceError(
                f"{path}: record {number}at byte {start + at}{_of_unpacked(packed)} is damaged, or the file "
                f"is no "
                f"TFRecord file: its length, {length}, doesn't match its checksum. Fetch the file again, or "
                f"name "
                f"its format with --format"
            )
        if size - at < length + _AROUND:
            _check_memory(length, path)
            break
        starts.append(at + _HEADER.size)
        lengths.append(length)
        at += length + _AROUND
    return starts, lengths, at


def _check_memory(length: int, path: Path) -> None:
    """Raise SourceError for a record that has no room in memory: 2 MB of gzip can hold one of 2 GB."""
    if length <= _LARGE_BYTES:
        return
    room = read_available_bytes()
    if length * _COPIES > room:
        raise SourceError(
            f"{path}: a record must fit into memory {_COPIES} times. Received: one of {length} bytes, where "
            f"{room} are free. Write smaller records, or import on a machine with more memory"
        )


def _truncated(path: Path, packed: bool, rest: bytearray, first: int | None, start: int) -> SourceError:
    needs = _HEADER.unpack_from(rest)[0] + _AROUND if len(rest) >= _HEADER.size else None
    of = f"{needs} bytes" if needs is not None else f"the {_HEADER.size} bytes of its length"
    number = "" if first is None else f"{first} "
    return SourceError(
        f"{path} is truncated: record {number}at byte {start}{_of_unpacked(packed)} has {len(rest)} of {of}. "
        f"Fetch it again"
    )


def _of_unpacked(packed: bool) -> str:
    return " of the unpacked file" if packed else ""


def check_records(chunk: RecordChunk, path: Path) -> None:
    """Raise SourceError if the checksum of a record is not that of its bytes."""
    view = memoryview(chunk.data)
    for record, (start, length) in enumerate(zip(chunk.starts.tolist(), chunk.lengths.tolist(), strict=True)):
        (stored,) = _CHECKSUM.unpack_from(view, start + length)
        computed = mask_checksum(google_crc32c.value(chunk.data[start : start + length]))
        if stored != computed:
            raise SourceError(
                f"{path}: {chunk.place(record)} is damaged: its checksum is {stored:08x}, its {length} bytes "
                f"have {computed:08x}. Fetch the file again"
            )


@contextlib.contextmanager
def _opened(path: Path, packed: bool) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield (stream of the records, the file below it, whose position shows how much has been read)."""
    with path.open("rb", buffering=0) as file:
        if not packed:
            yield file, file
            return
        try:
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                yield stream, file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(
                f"{path} can't be unpacked: {error}. It is truncated or damaged; fetch it again"
            ) from error
