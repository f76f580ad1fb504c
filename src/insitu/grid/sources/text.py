"""Lines of text: each is a row of the column `text`. Packed files are unpacked on the way."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT
from insitu.grid.sources.base import Block, SourceOptions
from insitu.grid.sources.packing import Lines, add_packings, is_packed, read_lines
from insitu.grid.sources.parallel import map_ordered

_SAMPLE_BYTES = 256 << 10
"""Bytes from which the number of rows is guessed."""
_CHUNK_BYTES = 4 << 20
"""Bytes of text that are split at once, unless a line is longer."""
_FORM = "Text has a row on each line"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class TextSource:
    """Lines end with a line feed, with or without a carriage return before it. Empty lines are rows, too."""

    format: ClassVar[str] = "text"
    suffixes: ClassVar[tuple[str, ...]] = add_packings(".txt")
    columns: tuple[Column, ...] = (Column("text", TEXT),)

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        with contextlib.closing(read_lines(path, _SAMPLE_BYTES, 0, _FORM)) as chunks:
            sample = next(chunks, None)
        if sample is None:
            raise SourceError(f"{path} has no lines. Leave it out")
        rows = len(self._split(sample)[1])
        unpacked = sample.end / max(1, sample.source_bytes) if is_packed(path) else 1.0
        total = max(sample.end, path.stat().st_size * max(1.0, unpacked))
        self.expected_rows = max(1, round(rows * total / sample.end))

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        with contextlib.ExitStack() as stack:
            lines = read_lines(self.path, min(block_bytes, _CHUNK_BYTES), start, _FORM)
            chunks = stack.enter_context(contextlib.closing(lines))
            split = stack.enter_context(contextlib.closing(map_ordered(self._split, chunks)))
            for chunk, texts in split:
                yield Block({"text": texts}, len(texts), chunk.source_bytes, chunk.end)

    def _split(self, chunk: Lines) -> tuple[Lines, Any]:
        """Return (chunk, its lines without their ends, as an array of large strings). Raises SourceError."""
        try:
            text = chunk.text.decode()
        except UnicodeDecodeError as error:
            raise self._refuse(chunk, error) from error
        lines = pa.array([text.removesuffix("\n")], pa.large_utf8())
        found = pc.split_pattern(lines, "\n").flatten()
        return chunk, pc.replace_substring_regex(found, "\r$", "") if "\r" in text else found

    def _refuse(self, chunk: Lines, error: UnicodeDecodeError) -> SourceError:
        place = f"at byte {chunk.start + error.start} of the text"
        if chunk.start <= len(codecs.BOM_UTF8):
            line = chunk.text.count(b"\n", 0, error.start) + 1
            place = f"in line {line}, {place}"
        binary = b"\0" in chunk.text or chunk.text.startswith(_UTF_16)
        found = "binary data or UTF-16" if binary else f"another encoding ({error.reason})"
        encoding = "UTF-16" if binary else "LATIN1"
        return SourceError(
            f"{self.path} must be text in UTF-8. Received: {found} {place}. If it is text, convert it, such "
            f"as with `iconv -f {encoding} -t UTF-8 {self.path.name} > new.txt`"
        )
