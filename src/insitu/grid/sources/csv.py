"""CSV with a header line, read block by block; `.csv.gz` is unpacked on the way.

Types follow from the first 2 MiB of each file, as Arrow infers them: whole numbers are int64, other
numbers float64, `true` and `false` bool, all else text (dates too). Where files differ, int64 gives way
to float64. An empty field is NaN in a float64 column and the empty text in a text one. A value further on
that doesn't fit its column's type is an error.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import pyarrow as pa
import pyarrow.csv as pa_csv

from insitu.errors import SourceError
from insitu.grid.partitions import TEXT
from insitu.grid.sources.base import Block, SourceOptions
from insitu.grid.sources.tables import arrow_errors, is_of_the_system, values_of_batch
from insitu.spec import Column

_BLOCK_BYTES = 2 << 20
"""Read at once at the most, since Arrow reads several blocks ahead; 8 MiB take three times the memory."""
_BEGINNING = 64 << 10
"""Bytes of a file that are looked at before Arrow reads it."""
_DTYPES = {pa.int64(): "int64", pa.float64(): "float64", pa.bool_(): "bool", pa.large_utf8(): TEXT}


class CsvSource:
    format: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".csv.gz")

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        _check_text(path)
        with arrow_errors(path), self._opened(_BLOCK_BYTES, {}) as (reader, _):
            self._types = {field.name: _kept_type(field.type) for field in reader.schema}
            if len(self._types) != len(reader.schema) or "" in self._types:
                raise SourceError(
                    f"{path}: each column needs a name of its own. Received: {reader.schema.names}"
                )
            if not next((batch.num_rows for batch in reader if batch.num_rows), 0):
                raise SourceError(f"{path} has no rows below its header. Leave it out")
        for name in options.float_columns & self._types.keys():
            self._types[name] = pa.float64()
        self.columns: tuple[Column, ...] = tuple(
            Column(name, _DTYPES[kind]) for name, kind in self._types.items()
        )

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        with self._explained(), self._opened(min(block_bytes, _BLOCK_BYTES), self._types) as (reader, file):
            for batch in reader:
                if batch.num_rows:
                    values = values_of_batch(batch, self.columns, self.path)
                    yield Block(values, batch.num_rows, file.tell())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if is_of_the_system(error):
                raise
            if "invalid UTF8" in str(error):
                raise _not_utf8(self.path, "bytes that no UTF-8 text has", "LATIN1") from error
            raise SourceError(
                f"{self.path}: {error}. The types of columns follow from the first "
                f"{_BLOCK_BYTES >> 20} MiB of each file; where later rows don't fit them, correct "
                f"those rows or convert the file to Parquet with the types that you want"
            ) from error

    @contextlib.contextmanager
    def _opened(self, block_bytes: int, types: Mapping[str, Any]) -> Iterator[tuple[Any, IO[bytes]]]:
        """Yield (reader of batches, the file below it, whose position shows how much has been read)."""
        convert = pa_csv.ConvertOptions(column_types=dict(types), timestamp_parsers=[])
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self.path.open("rb"))
            stream: Any = stack.enter_context(pa.PythonFile(file, "r"))
            if self.path.name.lower().endswith(".gz"):
                stream = stack.enter_context(pa.CompressedInputStream(stream, "gzip"))
            read = pa_csv.ReadOptions(block_size=block_bytes)
            yield stack.enter_context(pa_csv.open_csv(stream, read, convert_options=convert)), file


def _check_text(path: Path) -> None:
    """Raise SourceError where the beginning of a file shows that it isn't text, or not in UTF-8."""
    with path.open("rb") as raw:
        packed = path.name.lower().endswith(".gz")
        try:
            beginning = (gzip.GzipFile(fileobj=raw) if packed else raw).read(_BEGINNING)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
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
