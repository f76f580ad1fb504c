"""Files that are packed as a whole, by gzip, Zstandard or bzip2, and lines of text in them."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from insitu.base.errors import SourceError
from insitu.grid.sources.tables import is_of_the_system

PACKINGS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Suffix -> how a file is packed, in Arrow's word."""
MOST_LINE_BYTES = 1 << 30
"""Arrow parses less than 2 GiB at once."""
_PIECE_BYTES = 4 << 20
"""Bytes that are read at once."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines of a file."""

    #: The lines as they are in the file.
    text: bytes
    #: The byte of the unpacked file at which the text begins.
    start: int
    #: The byte of the unpacked file at which the text ends.
    end: int
    #: Bytes of the file that have been read.
    source_bytes: int


def add_packings(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of plain files, and those of the same files packed."""
    return tuple(suffix + packed for packed in ("", ".gz", ".zst", ".bz2") for suffix in suffixes)


def is_packed(path: Path) -> bool:
    """Return whether a file's name says that it is packed."""
    return path.suffix.lower() in PACKINGS


@contextlib.contextmanager
def open_unpacked(path: Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield (stream of the bytes, the file below it, whose position shows how much has been read).

    Raises SourceError if it can't be unpacked.
    """
    with path.open("rb", buffering=0) as file:
        if not is_packed(path):
            yield file, file
            return
        try:
            with (
                pa.PythonFile(file, "r") as raw,
                pa.CompressedInputStream(raw, PACKINGS[path.suffix.lower()]) as stream,
            ):
                yield stream, file
        except (OSError, EOFError, pa.ArrowException) as error:
            if is_of_the_system(error):
                raise
            raise SourceError(
                f"{path} can't be unpacked: {error}. It is truncated or damaged; fetch it again"
            ) from error


def skip_bytes(stream: Any, size: int, packed: bool) -> None:
    """Move on by `size` bytes of what is unpacked."""
    if not packed:
        stream.seek(size)
        return
    while size:
        part = len(stream.read(min(size, _PIECE_BYTES)))
        if not part:
            return
        size -= part


def read_lines(path: Path, chunk_bytes: int, start: int, form: str) -> Generator[Lines, None, None]:
    """Yield a file from byte `start` of its text on, in chunks of whole lines, without a byte order mark.

    `form` says what the lines are, for messages. Raises SourceError for a line of more than MOST_LINE_BYTES.
    """
    with open_unpacked(path) as (stream, file):
        skip_bytes(stream, start, is_packed(path))
        buffer = bytearray()
        if not start:
            buffer += stream.read(len(codecs.BOM_UTF8))
            if buffer == codecs.BOM_UTF8:
                start = len(buffer)
                buffer.clear()
        while True:
            piece = stream.read(min(chunk_bytes, _PIECE_BYTES))
            searched = max(0, len(buffer) - 1)
            buffer += piece
            end = buffer.rfind(b"\n", searched) + 1 if piece else len(buffer)
            if end:
                yield Lines(bytes(buffer[:end]), start, start + end, file.tell())
                del buffer[:end]
                start += end
            elif len(buffer) > MOST_LINE_BYTES:
                raise SourceError(
                    f"{path}: a line must have at most {MOST_LINE_BYTES} bytes. Received: one of more from "
                    f"byte {start} on. {form}"
                )
            if not piece:
                return
