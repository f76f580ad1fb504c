"""CSV with a header line. `.csv.gz` and `.csv.zst` are unpacked on the way.

Commas separate fields, or the semicolons or tabs of a header that has no comma. A file is cut into chunks
of whole rows, which threads parse. Quoted fields may hold line ends.

Types follow from the first 2 MiB of each file, as Arrow infers them: whole numbers are int64, other
numbers float64, `true` and `false` bool, all else text (dates too). If files differ, int64 gives way to
float64. An empty field is NaN in a float64 column and the empty text in a text one. A value further on that
doesn't fit its column's type is an error.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT
from insitu.grid.sources.base import Block, SourceOptions
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.tables import arrow_errors, is_of_the_system, values_of_batch

_BLOCK_BYTES = 2 << 20
"""Bytes from which types follow."""
_CHUNK_BYTES = 4 << 20
"""Bytes of text that are parsed at once, unless a row is longer."""
MOST_ROW_BYTES = 1 << 30
"""Arrow parses less than 2 GiB at once."""
_PACKED = {".gz": "gzip", ".zst": "zstd"}
_QUOTE = ord('"')
_OTHER_DELIMITERS = ";\t"
"""Separators of fields if the header has no comma."""
_QUOTED = re.compile(rb'"(?>[^"]++|"")*+"')
_BEGINNING = 64 << 10
"""Bytes of a file that are looked at before Arrow reads it."""
_DTYPES = {pa.int64(): "int64", pa.float64(): "float64", pa.bool_(): "bool", pa.large_utf8(): TEXT}


class CsvSource:
    format: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".csv.gz", ".csv.zst")

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._delimiter = _find_delimiter(_check_text(path))
        sample, last = self._sample()
        self._types = {field.name: _kept_type(field.type) for field in sample.schema}
        if len(self._types) != len(sample.schema) or "" in self._types:
            raise SourceError(f"{path}: each column needs a name of its own. Received: {sample.schema.names}")
        unpacked = last.end / max(1, last.source_bytes) if self._packing else 1.0
        text_bytes = path.stat().st_size * max(1.0, unpacked)
        self.expected_rows = round(sample.num_rows * max(1.0, text_bytes / last.end))
        for name in options.float_columns & self._types.keys():
            self._types[name] = pa.float64()
        self.columns: tuple[Column, ...] = tuple(
            Column(name, _DTYPES[kind]) for name, kind in self._types.items()
        )

    @property
    def _packing(self) -> str | None:
        return _packing(self.path)

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        rows_before: int | None = None if start else 0
        with contextlib.ExitStack() as stack:
            chunks = self._chunks(min(block_bytes, _CHUNK_BYTES), start)
            stack.enter_context(contextlib.closing(chunks))
            parsed = stack.enter_context(contextlib.closing(map_ordered(self._parse, chunks)))
            for chunk, found in parsed:
                if isinstance(found, Exception):
                    raise self._explain(found, rows_before) from found
                for batch in found:
                    values = values_of_batch(batch, self.columns, self.path)
                    yield Block(values, batch.num_rows, chunk.source_bytes, chunk.end)
                    rows_before = None if rows_before is None else rows_before + batch.num_rows

    def _parse(self, chunk: _Chunk) -> tuple[_Chunk, list[Any] | Exception]:
        """Return the rows of a chunk as a record batch, none if there are none, or the error of parsing."""
        if not chunk.text.strip():
            return chunk, []
        try:
            table = self._read(chunk.text, self._types, list(self._types) if chunk.start else None)
        except (pa.ArrowException, OSError) as error:
            return chunk, error
        return chunk, [batch for batch in table.combine_chunks().to_batches() if batch.num_rows]

    def _read(self, text: bytes, types: Mapping[str, Any], names: list[str] | None) -> Any:
        """Return the rows of `text` as a table. Without `names` its first row has them.

        Arrow gets no file. A thread of its own that reads ahead from one of Python's may still run as the
        process exits, and then hangs or aborts it.
        """
        read = pa_csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names)
        parse = pa_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        convert = pa_csv.ConvertOptions(column_types=types, timestamp_parsers=[])
        with pa.BufferReader(text) as stream:
            return pa_csv.read_csv(stream, read, parse, convert)

    def _sample(self) -> tuple[Any, _Chunk]:
        """Return (the first rows with the types that Arrow infers, the chunk that ends with them)."""
        text = b""
        with contextlib.closing(self._chunks(_BLOCK_BYTES, 0)) as chunks:
            for chunk in chunks:
                text += chunk.text
                try:
                    table = self._read(text, {}, None) if text.strip() else None
                except (pa.ArrowException, OSError) as error:
                    raise self._explain(error, 0) from error
                if table:
                    return table, chunk
        raise SourceError(f"{self.path} has no rows below its header. Leave it out")

    def _chunks(self, chunk_bytes: int, start: int) -> Generator[_Chunk, None, None]:
        """Yield the file from byte `start` of its text on, in chunks of whole rows."""
        with arrow_errors(self.path), self._unpacked() as (stream, file):
            _skip(stream, file, start, self._packing is not None)
            rest = b""
            while True:
                more = stream.read(min(max(chunk_bytes, len(rest)), MOST_ROW_BYTES - len(rest) + 1))
                text = rest + more
                end = _end_of_rows(text, self._delimiter) if more else len(text)
                if more and not start and not text[:end].strip():
                    end = 0  # the header is still to come
                if end:
                    yield _Chunk(text[:end], start, start + end, file.tell())
                elif len(text) > MOST_ROW_BYTES:
                    raise SourceError(
                        f"{self.path}: a row must have at most {MOST_ROW_BYTES} bytes. Received: one of more "
                        f"from byte {start} on. A quote that isn't closed makes the rest of a file one row"
                    )
                if not more:
                    return
                start, rest = start + end, text[end:]

    def _explain(self, error: Exception, rows_before: int | None) -> Exception:
        """Return what to raise for an error of parsing, with the row's number in the file, not the chunk."""
        if isinstance(error, OSError) and is_of_the_system(error):
            return error
        if "invalid UTF8" in str(error):
            return _not_utf8(self.path, "bytes that no UTF-8 text has", "LATIN1")
        before = None if rows_before is None else rows_before + bool(rows_before)

        def number(found: re.Match[str]) -> str:
            return "" if before is None else f"Row #{int(found[1]) + before}: "

        return SourceError(
            f"{self.path}: {re.sub('Row #([0-9]+): ', number, str(error))}. The types of columns follow from "
            f"the first {_BLOCK_BYTES >> 20} MiB of each file; where later rows don't fit them, correct "
            f"those rows or convert the file to Parquet with the types that you want"
        )

    @contextlib.contextmanager
    def _unpacked(self) -> Iterator[tuple[Any, IO[bytes]]]:
        """Yield (stream of the text, the file below it, whose position shows how much has been read)."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self.path.open("rb"))
            stream: Any = stack.enter_context(pa.PythonFile(file, "r"))
            if self._packing:
                stream = stack.enter_context(pa.CompressedInputStream(stream, self._packing))
            yield stream, file


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Whole rows of a file."""

    #: The rows as they are in the file; in the first chunk with the header before them.
    text: bytes
    #: The byte of the unpacked file at which the text begins.
    start: int
    #: The byte of the unpacked file at which the text ends.
    end: int
    #: Bytes of the file that have been read.
    source_bytes: int


def _packing(path: Path) -> str | None:
    """Return how a file is packed, in Arrow's word; None: not at all."""
    return _PACKED.get(path.suffix.lower())


@functools.cache
def _whole_rows(delimiter: str) -> re.Pattern[bytes]:
    """Return the pattern of rows to their line ends, which quoted fields may hold, too. A quote within an
    unquoted field is text."""
    by = delimiter.encode()
    field = rb'(?>"(?>[^"]++|"")*+"[^,\r\n]*+|[^",\r\n][^,\r\n]*+|)'.replace(b",", by)
    return re.compile(rb"(?>(?>" + field + by + rb")*+" + field + rb"(?>\r\n?|\n))*+")


def _end_of_rows(text: bytes, delimiter: str) -> int:
    """Return the byte behind the last row that is whole; 0 if none is."""
    quotes = _plain_quotes(np.frombuffer(text, np.uint8), delimiter)
    if quotes is None:
        found = _whole_rows(delimiter).match(text)
        return found.end() if found else 0
    # Rows end where no quote is open: before the first one, and between a closing and an opening one.
    for number in range(len(quotes) - len(quotes) % 2, -1, -2):
        start = int(quotes[number - 1]) if number else 0
        stop = int(quotes[number]) if number < len(quotes) else len(text)
        # A "\r" at the end may belong to a "\n" that follows.
        end = max(text.rfind(b"\n", start, stop), text.rfind(b"\r", start, min(stop, len(text) - 1)))
        if end >= 0:
            return end + 1
    return 0


def _plain_quotes(text: npt.NDArray[np.uint8], delimiter: str) -> npt.NDArray[np.int64] | None:
    """Return where quotes are, if by turns they open and close fields, doubled ones both; None for others."""
    quotes = np.flatnonzero(text == _QUOTE)
    opening, closing = quotes[::2], quotes[1::2]
    before = text[opening[opening > 0] - 1]
    after = text[closing[closing < len(text) - 1] + 1]
    beside = np.isin(np.arange(256), list(b'"\r\n' + delimiter.encode()))
    return quotes if beside[before].all() and beside[after].all() else None


def _skip(stream: Any, file: IO[bytes], size: int, packed: bool) -> None:
    """Move on by `size` bytes of text."""
    if not packed:
        file.seek(size)
        return
    while size:
        part = len(stream.read(min(size, _CHUNK_BYTES)))
        if not part:
            return
        size -= part


def _find_delimiter(beginning: bytes) -> str:
    """Return what separates the fields of a file that begins so: a comma, unless the header has none outside
    of quotes and has another."""
    header = _QUOTED.sub(b"", beginning).strip(b"\r\n").splitlines()[:1]
    counts = {by: b"".join(header).count(by.encode()) for by in _OTHER_DELIMITERS}
    most = max(counts, key=lambda by: counts[by])
    return most if counts[most] and b"," not in header[0] else ","


def _check_text(path: Path) -> bytes:
    """Return the beginning of a file. Raises SourceError if it isn't text, or not in UTF-8."""
    with path.open("rb") as raw, pa.PythonFile(raw, "r") as stream, contextlib.ExitStack() as stack:
        text: Any = stream
        packing = _packing(path)
        try:
            if packing:
                text = stack.enter_context(pa.CompressedInputStream(stream, packing))
            beginning = text.read(_BEGINNING)
        except (pa.ArrowException, OSError, EOFError) as error:
            if is_of_the_system(error):
                raise
            raise SourceError(f"{path} can't be unpacked: {error}. It may be truncated") from error
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _not_utf8(path, "the mark of UTF-16", "UTF-16")
    undecodable = _decoding_error(beginning)
    if b"\0" in (beginning if undecodable else beginning.partition(b"\n")[0]):
        raise SourceError(
            f"{path} must be CSV, which is text in UTF-8. Received: binary data, or UTF-16 without its mark. "
            f"If the file has another format, name it with --format"
        )
    if undecodable:
        raise _not_utf8(path, f"{undecodable.reason} at byte {undecodable.start}", "LATIN1")
    return bytes(beginning)


def _decoding_error(beginning: bytes) -> UnicodeDecodeError | None:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError as error:
        return error
    return None


def _not_utf8(path: Path, found: str, encoding: str) -> SourceError:
    return SourceError(
        f"{path} must be encoded in UTF-8. Received: {found}. Convert it, such as with `iconv -f {encoding} "
        f"-t UTF-8 {path.name} > new.csv`"
    )


def _kept_type(inferred: Any) -> Any:
    """Return the type to read a column with, given the one that Arrow infers."""
    if pa.types.is_null(inferred):
        return pa.float64()
    return inferred if inferred in _DTYPES else pa.large_utf8()
