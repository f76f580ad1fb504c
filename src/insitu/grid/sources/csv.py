"""CSV: rows of text. `.csv.gz` and `.csv.zst` are unpacked on the way.

How rows are divided into fields is seen from the beginning of a file, unless the user says it (`CsvOptions`).
A file is cut into chunks of whole rows, which threads parse. Quoted fields may hold line ends.

Types follow from the first 2 MiB of each file, as Arrow infers them: whole numbers are int64, other
numbers float64, `true` and `false` bool, times in ISO's form are times, all else text. Whole numbers with
leading zeros, such as 01234, are text, and so are hexadecimal ones. Whole numbers that only float64 would
hold, and not exactly, are refused. An empty field is a missing value, but the empty text in a column of
text. A value further on that doesn't fit its column's type is an error. A column that is given a dtype which
Arrow doesn't make of its text is read as text, and `text_forms.py` makes the values.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import itertools
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from insitu.base.errors import SourceError
from insitu.grid.sources.base import CsvOptions, SourceOptions
from insitu.grid.sources.column_options import TEXT_WORDS, ColumnOptions
from insitu.grid.sources.lossy import find_lossy, list_large
from insitu.grid.sources.packing import PACKINGS, skip_bytes
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.table_layout import ColumnProblems, Problem, is_text, number_names
from insitu.grid.sources.tables import TableBatch, arrow_errors, is_of_the_system
from insitu.grid.sources.text_forms import (
    ask_decimal,
    describe_hint,
    find_decimals,
    first_unfit,
    read_texts,
    require_fit,
    suggest_dtypes,
    suggest_times,
    trim,
    type_of_dtype,
)

_BLOCK_BYTES = 2 << 20
"""Bytes from which types follow."""
_CHUNK_BYTES = 4 << 20
"""Bytes of text that are parsed at once, unless a row is longer."""
MOST_ROW_BYTES = 1 << 30
"""Arrow parses less than 2 GiB at once."""
_DELIMITERS = ",;\t|"
"""What may separate fields, the most usual first."""
_LINES = 50
"""Lines that are looked at to find what separates fields."""
_BEGINNING = 64 << 10
"""Bytes of a file that are looked at before Arrow reads it."""
_NUMBER = re.compile(r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?")
_DECIMAL_COMMA = r"^\s*[-+]?\d*,\d+\s*$"
_THOUSANDS = r"^\s*[-+]?[1-9]\d{0,2},\d{3}\s*$"
_WHOLE = r"^\s*[-+]?\d*\s*$"
_LEADING_ZERO = r"^\s*[-+]?0[\dxX]"
"""Arrow takes 007 for 7, and 0x1F, of which some are larger than int64, for 31."""
_CONVERSION = re.compile(
    r"In CSV column #(\d+): (?:Row #\d+: )?CSV conversion error to (.+?): invalid value '(.*)'"
)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How a file is divided into fields."""

    delimiter: str
    #: The sign before decimals.
    decimal: str
    #: What encloses fields; False: nothing does.
    quote: str | bool
    #: The encoding, as Python names it; empty: UTF-8.
    encoding: str
    has_header: bool
    #: What begins lines that are left out; empty: nothing does.
    comment: str
    null_values: tuple[str, ...]


class CsvTable:
    format: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".csv.gz", ".csv.zst", ".csv.bz2", ".tsv", ".tsv.gz")
    counts_rows = False
    missing: ClassVar[Mapping[str, int]] = {}

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._notes: list[str] = []
        self.problems: list[Problem] = []
        #: The dtypes of columns that the user has given: what they lose is meant.
        self._given, self._decimal = options.fields.dtypes, options.csv.decimal
        #: Columns that Arrow can't read as they are given -> the sign before their decimals.
        self._converted: dict[str, str] = {}
        #: Columns of text -> what makes values of them.
        self.hints: dict[str, str] = {}
        self._dialect = self._find_dialect(options.csv)
        #: The names of columns, and those in the file, if it has some.
        self._names: list[str] = []
        self._in_file: list[str] = []
        text, last, table = self._read_sample()
        try:
            sample = self._name_columns(table)
            if options.csv.decimal is None and self._has_decimal_commas(sample):
                self._dialect = replace(self._dialect, decimal=",")
                self._notes.append("a comma before decimals")
                self._names, self._in_file = [], []
                sample = self._name_columns(self._read(text, None, False))
            self._keep_leading_zeros(sample, text)
            self._keep_nanoseconds(sample)
            self.problems += self._list_lossy(text, sample, False)
            if any(_is_changed(each.type, self._types[each.name]) for each in sample.schema):
                sample = self._read(text, self._types, False)
            else:
                sample = sample.cast(pa.schema(self._types))
            self._check_given(text, sample, options.fields)
            self._find_hints(sample)
            self.sample = self._convert(sample, text, False).combine_chunks().to_batches()[0]
        except (pa.ArrowException, OSError) as error:
            raise self._explain(error, 0) from error
        unpacked = last.end / max(1, last.source_bytes) if self._is_streamed else 1.0
        text_bytes = path.stat().st_size * max(1.0, unpacked)
        self.expected_rows = max(1, round(sample.num_rows * max(1.0, text_bytes / last.end)))
        self.schema = self.sample.schema

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def _packing(self) -> str | None:
        """How the file is packed, in Arrow's word; None: not at all."""
        return PACKINGS.get(self.path.suffix.lower())

    @property
    def _is_streamed(self) -> bool:
        """Whether a place in the text is no place in the file."""
        return bool(self._packing or self._dialect.encoding)

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        rows_before: int | None = None if start else 0
        types = {name: wanted.get(name) or kind for name, kind in self._types.items() if name in wanted}
        if not types:  # of rows that have columns of folders alone
            types = {self._names[0]: pa.large_utf8()}
        # A number's leading zeros would be lost, unless the user wants numbers.
        whole = self._whole - self._given.keys()
        guarded = [
            name
            for name, kind in types.items()
            if name in whole and not is_text(kind) and not is_text(self._types[name])
        ]
        with contextlib.ExitStack() as stack:
            chunks = self._chunks(min(block_bytes, _CHUNK_BYTES), start)
            stack.enter_context(contextlib.closing(chunks))
            parse = functools.partial(self._parse, types=types, guarded=guarded)
            parsed = stack.enter_context(contextlib.closing(map_ordered(parse, chunks)))
            for chunk, found in parsed:
                if isinstance(found, Exception):
                    raise self._explain(found, rows_before) from found
                for batch in found:
                    yield TableBatch(batch, chunk.source_bytes, chunk.end)
                    rows_before = None if rows_before is None else rows_before + batch.num_rows

    def _parse(
        self, chunk: _Chunk, types: Mapping[str, Any], guarded: list[str]
    ) -> tuple[_Chunk, list[Any] | Exception]:
        """Return the rows of a chunk as a record batch, none if there are none, or the error of parsing."""
        if not chunk.text.strip():
            return chunk, []
        try:
            as_text = {name: pa.large_utf8() for name in types if name in self._converted}
            table = self._read(chunk.text, {**types, **as_text}, chunk.start > 0)
            table = self._convert(table, chunk.text, chunk.start > 0)
            problems = self._list_leading_zeros(chunk, guarded)
            problems += self._list_lossy(chunk.text, table, chunk.start > 0)
            if problems:
                raise ColumnProblems(self.path, problems)
        except (pa.ArrowException, OSError, SourceError) as error:
            return chunk, error
        return chunk, [batch for batch in table.combine_chunks().to_batches() if batch.num_rows]

    def _read(self, text: bytes, types: Mapping[str, Any] | None, is_behind_header: bool) -> Any:
        """Return the columns `types` of the rows of `text` as a table; None: all, of the types that Arrow
        infers.

        Arrow gets no file. A thread of its own that reads ahead from one of Python's may still run as the
        process exits, and then hangs or aborts it.
        """
        dialect = self._dialect
        has_names = dialect.has_header and not is_behind_header
        # Arrow finds no column among several of its name, so that others replace those of the file.
        is_renamed = has_names and len(set(self._in_file)) < len(self._in_file)
        text = text.lstrip(b"\r\n") if is_renamed else text
        in_file = self._in_file if has_names and not is_renamed else self._names
        given = dict(zip(self._names, in_file, strict=True))
        read = pa_csv.ReadOptions(
            use_threads=False,
            block_size=len(text) + 1,
            column_names=self._names or None if is_renamed or not has_names else None,
            skip_rows_after_names=int(is_renamed),
            autogenerate_column_names=not has_names and not self._names,
        )
        parse = pa_csv.ParseOptions(
            delimiter=dialect.delimiter, quote_char=dialect.quote, newlines_in_values=bool(dialect.quote)
        )
        nulls: dict[str, Any] = {}
        if dialect.null_values:
            nulls = {"null_values": list(dialect.null_values), "strings_can_be_null": True}
        convert = pa_csv.ConvertOptions(
            column_types=None if types is None else {given[name]: kind for name, kind in types.items()},
            include_columns=None if types is None else [given[name] for name in types],
            decimal_point=dialect.decimal,
            **nulls,
        )
        with pa.BufferReader(text) as stream:
            table = pa_csv.read_csv(stream, read, parse, convert)
        return table if types is None else table.rename_columns(list(types))

    # What is seen from the beginning

    def _find_dialect(self, options: CsvOptions) -> _Dialect:
        beginning, encoding = self._read_beginning(options.encoding)
        if encoding and options.encoding is None:
            self._notes.append(f"encoding {encoding}")
        if options.delimiter is None and beginning.lstrip()[:2] in ('{"', "[{", "[["):
            raise SourceError(
                f"{self.path} must be CSV. Received: text that begins with {beginning.lstrip()[:20]!r}, as "
                f"JSON does. Name its format with --format ndjson; if it is CSV, name its --delimiter"
            )
        quote = '"' if options.quote is None else options.quote or False
        lines = _first_lines(beginning, quote, options.comment)
        delimiter = options.delimiter
        if delimiter is None:
            delimiter = _find_delimiter(lines)
            if delimiter != ",":
                self._notes.append(f"{_NAMES_OF_DELIMITERS[delimiter]} between fields")
        fields = [_unquoted(part) for part in _split(lines[0], delimiter, quote)] if lines else []
        has_header = options.header
        if has_header is None:
            value = next((part for part in fields if _NUMBER.fullmatch(part.strip())), None)
            has_header = value is None
            if value is not None:
                text = (
                    f"its first row looks like values, such as {value}, which --no-header says; if it has "
                    f"the columns' names, give --header"
                )
                self.problems.append(Problem("", text, ("--no-header",)))
        return _Dialect(
            delimiter,
            options.decimal or ".",
            quote,
            encoding,
            has_header,
            options.comment or "",
            options.null_values,
        )

    def _read_beginning(self, encoding: str | None) -> tuple[str, str]:
        """Return the first characters of a file, and its encoding; empty: UTF-8. Raises SourceError if it
        isn't text."""
        path = self.path
        with path.open("rb") as raw, pa.PythonFile(raw, "r") as stream, contextlib.ExitStack() as stack:
            text: Any = stream
            try:
                if self._packing:
                    text = stack.enter_context(pa.CompressedInputStream(stream, self._packing))
                beginning = text.read(_BEGINNING)
            except (pa.ArrowException, OSError, EOFError) as error:
                if is_of_the_system(error):
                    raise
                raise SourceError(f"{path} can't be unpacked: {error}. It may be truncated") from error
        if encoding is None and beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "utf-16"
        if encoding is None or encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig"):
            encoding = ""
        undecodable = _decoding_error(beginning, encoding or "utf-8")
        if undecodable and not encoding and b"\0" not in beginning:
            found = f"{undecodable.reason} at byte {undecodable.start}"
            self.problems.append(_name_encoding(found))
            encoding, undecodable = "cp1252", _decoding_error(beginning, "cp1252")
            if undecodable:  # any bytes are text in it
                encoding, undecodable = "latin-1", None
        if not encoding and b"\0" in (beginning if undecodable else beginning.partition(b"\n")[0]):
            raise SourceError(
                f"{path} must be CSV, which is text. Received: binary data, or UTF-16 without its mark. If "
                f"the file has another format, name it with --format"
            )
        if undecodable:
            raise _undecodable(path, encoding, f"{undecodable.reason} at byte {undecodable.start}")
        decoder = codecs.getincrementaldecoder(encoding or "utf-8-sig")()
        return decoder.decode(beginning), encoding

    def _read_sample(self) -> tuple[bytes, _Chunk, Any]:
        """Return (the first rows as text, the chunk that ends with them, these rows as a table)."""
        text = b""
        with contextlib.closing(self._chunks(_BLOCK_BYTES, 0)) as chunks:
            for chunk in chunks:
                text += chunk.text
                if not text.strip():
                    continue
                try:
                    table = self._read(text, None, False)
                    if table.num_rows:
                        return text, chunk, table
                except (pa.ArrowException, OSError) as error:
                    raise self._explain(error, 0) from error
        rows = "rows below its header" if self._dialect.has_header else "rows"
        raise SourceError(f"{self.path} has no {rows}. Leave it out")

    def _name_columns(self, table: Any) -> Any:
        """Return the first rows under the columns' names, and note these and the types."""
        names = self._in_file = table.schema.names
        if not self._dialect.has_header:
            names = [f"column_{number}" for number in range(1, len(names) + 1)]
            self._notes[:] = [each for each in self._notes if not each.startswith("no header")]
            self._notes.append(f"no header: columns are {names[0]} to {names[-1]}")
        else:
            names, said = number_names(names)
            self._notes += [each for each in said if each not in self._notes]
        self._names = names
        found = {name: _kept_type(each.type) for name, each in zip(names, table.schema, strict=True)}
        #: The type of each column.
        self._types: dict[str, Any] = found
        #: Columns in which no number has decimals so far.
        self._whole = {
            name
            for name, each in zip(names, table.schema, strict=True)
            if pa.types.is_int64(each.type) or pa.types.is_null(each.type)
        }
        return table.rename_columns(names)

    def _has_decimal_commas(self, sample: Any) -> bool:
        """Return whether numbers have a comma before their decimals, and no others a point."""
        if self._dialect.delimiter == ",":
            return False
        with_commas, are_decimals = [], False
        for name in sample.schema.names:
            values = sample.column(name)
            if is_text(values.type) and len(filled := values.filter(pc.not_equal(values, ""))):
                commas = pc.match_substring_regex(filled, _DECIMAL_COMMA)
                numbers = pc.or_(commas, pc.match_substring_regex(filled, _WHOLE))
                if pc.all(numbers).as_py() and pc.any(commas).as_py():
                    with_commas.append(name)
                    grouped = pc.match_substring_regex(filled.filter(commas), _THOUSANDS)
                    are_decimals |= not pc.all(grouped).as_py()
        points = [each.name for each in sample.schema if pa.types.is_floating(each.type)]
        if with_commas and points:
            text = f"has numbers with a comma before decimals, and {points[0]} has some with a point"
            self.problems += [Problem(name, text, ("--decimal", ".")) for name in with_commas]
            return False
        if with_commas and not are_decimals:
            text = "has numbers as 1,234: --decimal , reads decimals, --decimal . leaves thousands as text"
            self.problems += [Problem(name, text, ("--decimal", ",")) for name in with_commas]
            return False
        return bool(with_commas)

    def _keep_leading_zeros(self, sample: Any, text: bytes) -> None:
        """Make columns text whose whole numbers have leading zeros."""
        whole = [each.name for each in sample.schema if pa.types.is_int64(each.type)]
        if not whole or not _may_have_leading_zeros(text, self._dialect):
            return
        texts = self._read(text, dict.fromkeys(whole, pa.large_utf8()), False)
        kept = [name for name in whole if _has_leading_zeros(texts.column(name))]
        for name in kept:
            self._types[name] = pa.large_utf8()
        if kept:
            self._notes.append(f"{', '.join(kept)} as text, since numbers have leading zeros")

    def _keep_nanoseconds(self, sample: Any) -> None:
        """Give times of more than microseconds a type that holds them."""
        for each in sample.schema:
            if pa.types.is_timestamp(each.type) and each.type.unit == "ns":
                values = sample.column(each.name)
                micro = values.cast(self._types[each.name], safe=False)
                if not pc.all(pc.equal(micro.cast(each.type), values)).as_py():
                    self._types[each.name] = each.type

    def _list_lossy(self, text: bytes, table: Any, is_behind_header: bool) -> list[Problem]:
        """Return the columns of float64 with whole numbers that it doesn't hold, such as long ids."""
        large = [name for name in list_large(table) if name not in self._given]
        if not large:
            return []
        texts = self._read(text, dict.fromkeys(large, pa.large_utf8()), is_behind_header)
        return find_lossy({name: (texts.column(name), False) for name in large})

    def _check_given(self, text: bytes, sample: Any, fields: ColumnOptions) -> None:
        """Find the columns that Arrow can't read as they are given, and how to read them; name the others."""
        dtypes = {n: d for n, d in self._given.items() if n in self._names and d not in TEXT_WORDS}
        for name in self._list_unread(text, dtypes, has_condition=fields.where is not None):
            dtype = dtypes[name]
            inferred, texts = sample.schema.field(name).type, self._read_trimmed(text, name)
            signs = find_decimals(texts, dtype, self._usual) if is_text(inferred) else []
            if len(signs) == 1:
                self._converted[name] = signs[0]
            elif signs:
                found, sign = ask_decimal(texts, dtype), "." if self._dialect.delimiter == "," else ","
                self.problems.append(Problem(name, found, ("--decimal", sign), True))
            else:
                self.problems.append(self._refuse_given(name, texts, inferred, text))

    def _list_unread(self, text: bytes, dtypes: Mapping[str, str], *, has_condition: bool) -> list[str]:
        """Return the columns that can't be read as they are given; a condition may drop what doesn't fit."""
        kinds, table, unread = {name: type_of_dtype(dtype) for name, dtype in dtypes.items()}, None, []
        with contextlib.suppress(pa.ArrowException):  # all at once, which mostly works
            table = self._read(text, kinds, False) if kinds else None
        for name, dtype in dtypes.items():
            try:
                found = self._read(text, {name: kinds[name]}, False) if table is None else table
                values = found.column(name)
                if not has_condition:
                    require_fit(trim(values, self._null_values) if "%" in dtype else values, dtype)
            except pa.ArrowException:
                unread.append(name)
        return unread

    def _refuse_given(self, name: str, texts: Any, inferred: Any, text: bytes) -> Problem:
        dtype = self._given[name]
        # The sign by which more values fit is the one that is meant.
        places = [first_unfit(texts, dtype, sign) for sign in ".,"]
        place = max(pc.index(texts.is_valid(), True).as_py(), *(each or 0 for each in places))
        fitting = suggest_times(texts) if pa.types.is_temporal(type_of_dtype(dtype)) or "%" in dtype else []
        if not fitting and (pa.types.is_int64(inferred) or pa.types.is_floating(inferred)):
            fitting = ["int64" if pa.types.is_int64(inferred) else "float64"]
        fitting = fitting or suggest_dtypes(texts, self._usual) or ["str"]
        either = f", which {' and '.join(fitting)} take alike" if len(fitting) > 1 else ""
        line = _line_of(text, place, self._dialect)
        found = f"is given as {dtype}, and has {texts[place].as_py()[:80]!r} in {line}{either}"
        return Problem(name, found, ("--dtype", f"{name}={fitting[0]}"), True)

    def _find_hints(self, sample: Any) -> None:
        """Note which columns of text have values that `--dtype` makes."""
        for each in sample.schema:
            if is_text(each.type) and each.name not in self._given:
                texts = sample.column(each.name).combine_chunks()
                if hint := describe_hint(each.name, texts, self._null_values, self._usual):
                    self.hints[each.name] = hint

    @property
    def _usual(self) -> str | None:
        """The sign before decimals that the user gives, or that the file's other numbers have."""
        return self._decimal or ("," if self._dialect.decimal == "," else None)

    @property
    def _null_values(self) -> list[str]:
        return list(self._dialect.null_values) or pa_csv.ConvertOptions().null_values

    def _read_trimmed(self, text: bytes, name: str) -> Any:
        column = self._read(text, {name: pa.large_utf8()}, False).column(name)
        return trim(column.combine_chunks(), self._null_values)

    def _convert(self, table: Any, text: bytes, is_behind_header: bool) -> Any:
        """Return rows with the values of columns that Arrow reads as text. Raises ArrowInvalid."""
        for name in [each for each in table.schema.names if each in self._converted]:
            dtype, sign = self._given[name], self._converted[name]
            texts = trim(table.column(name).combine_chunks(), self._null_values)
            try:
                values = read_texts(texts, dtype, sign)
            except pa.ArrowException as error:
                place = first_unfit(texts, dtype, sign) or 0
                row = place + 1 + (self._dialect.has_header and not is_behind_header)
                raise pa.ArrowInvalid(  # as Arrow says it
                    f"In CSV column #{self._names.index(name)}: Row #{row}: CSV conversion error to {dtype}: "
                    f"invalid value '{texts[place]}'"
                ) from error
            table = table.set_column(table.schema.get_field_index(name), name, values)
        return table

    def _list_leading_zeros(self, chunk: _Chunk, guarded: list[str]) -> list[Problem]:
        if not guarded or not _may_have_leading_zeros(chunk.text, self._dialect):
            return []
        texts = self._read(chunk.text, dict.fromkeys(guarded, pa.large_utf8()), chunk.start > 0)
        return [
            Problem(name, "has numbers with leading zeros, which would be lost", ("--dtype", f"{name}=str"))
            for name in guarded
            if _has_leading_zeros(texts.column(name))
        ]

    def _chunks(self, chunk_bytes: int, start: int) -> Generator[_Chunk, None, None]:
        """Yield the file from byte `start` of its text on, in chunks of whole rows."""
        dialect = self._dialect
        with arrow_errors(self.path), self._unpacked() as (stream, file):
            skip_bytes(stream if self._is_streamed else file, start, self._is_streamed)
            rest = b""
            while True:
                more = stream.read(min(max(chunk_bytes, len(rest)), MOST_ROW_BYTES - len(rest) + 1))
                text = rest + more
                end = _end_of_rows(text, dialect.delimiter, dialect.quote) if more else len(text)
                kept = text[:end] if start else text[:end].removeprefix(codecs.BOM_UTF8)
                kept = _without_comments(kept, dialect)
                if more and not start and not kept.strip():
                    end = 0  # the header is still to come
                if end:
                    yield _Chunk(kept, start, start + end, file.tell())
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
        if isinstance(error, SourceError) or (isinstance(error, OSError) and is_of_the_system(error)):
            return error
        if "invalid UTF8" in str(error):
            return _undecodable(self.path, "", "bytes that no UTF-8 text has")
        before = None if rows_before is None else rows_before + (rows_before > 0 and self._dialect.has_header)

        def number(found: re.Match[str]) -> str:
            return "" if before is None else f"Row #{int(found[1]) + before}: "

        text = re.sub("Row #([0-9]+): ", number, str(error))
        found = _CONVERSION.search(str(error))
        if found is not None and int(found[1]) < len(self._names):
            name, value = self._names[int(found[1])], found[3]
            row = re.search(r"Row #\d+", text)
            fitting = "float64" if _NUMBER.fullmatch(value) and "," not in value else "str"
            if value.strip().isdecimal():  # which int64 doesn't hold
                fitting = "uint64" if len(value) <= 20 and int(value) < 1 << 64 else "str"
            given = self._given.get(name)
            if given == fitting or not found[2].startswith(("int", "uint", "float", "double")):
                fitting = "str"
            kind = f"{found[2]} by the first {_BLOCK_BYTES >> 20} MiB of the file"
            kind = f"given as {given}" if given else kind
            return ColumnProblems(
                self.path,
                [
                    Problem(
                        name,
                        f"is {kind}, and has {value[:80]!r}{f' in {row[0].lower()}' if row else ''}",
                        ("--dtype", f"{name}={fitting}"),
                    )
                ],
            )
        return SourceError(
            f"{self.path}: {text}. Correct that row; if another sign separates fields, name it by --delimiter"
        )

    @contextlib.contextmanager
    def _unpacked(self) -> Iterator[tuple[Any, IO[bytes]]]:
        """Yield (stream of the text in UTF-8, the file below it, whose position shows how much has been
        read)."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self.path.open("rb"))
            stream: Any = stack.enter_context(pa.PythonFile(file, "r"))
            if self._packing:
                stream = stack.enter_context(pa.CompressedInputStream(stream, self._packing))
            if self._dialect.encoding:
                stream = _Transcoded(stream, self._dialect.encoding, self.path)
            yield stream, file


class _Transcoded:
    """A stream of text in another encoding, as UTF-8."""

    def __init__(self, stream: Any, encoding: str, path: object) -> None:
        self._stream, self._encoding, self._path = stream, encoding, path
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._has_ended = False
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end. Raises SourceError."""
        while not self._rest and not self._has_ended:
            part = self._stream.read(size)
            self._has_ended = not part
            try:
                self._rest = self._decoder.decode(part, final=not part).encode()
            except UnicodeDecodeError as error:
                raise _undecodable(self._path, self._encoding, error.reason) from error
        text, self._rest = self._rest[:size], self._rest[size:]
        return text


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


def _row(delimiter: str, quote: str) -> bytes:
    """Return the pattern of a row to its line end, which quoted fields may hold, too. A quote within an
    unquoted field is text."""
    by, mark = re.escape(delimiter.encode()), re.escape(quote.encode())
    field = rb"(?>Q(?>[^Q]++|QQ)*+Q[^,\r\n]*+|[^Q,\r\n][^,\r\n]*+|)".replace(b",", by).replace(b"Q", mark)
    return rb"(?>(?>" + field + by + rb")*+" + field + rb"(?>\r\n?|\n))"


@functools.cache
def _whole_rows(delimiter: str, quote: str) -> re.Pattern[bytes]:
    """Return the pattern of rows."""
    return re.compile(_row(delimiter, quote) + rb"*+")


def _end_of_rows(text: bytes, delimiter: str, quote: str | bool) -> int:
    """Return the byte behind the last row that is whole; 0 if none is."""
    if not quote:
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1))
        return end + 1
    quotes = _plain_quotes(np.frombuffer(text, np.uint8), delimiter, str(quote))
    if quotes is None:
        found = _whole_rows(delimiter, str(quote)).match(text)
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


def _plain_quotes(text: npt.NDArray[np.uint8], delimiter: str, quote: str) -> npt.NDArray[np.int64] | None:
    """Return where quotes are, if by turns they open and close fields, doubled ones both; None for others."""
    quotes = np.flatnonzero(text == ord(quote))
    opening, closing = quotes[::2], quotes[1::2]
    before = text[opening[int(len(opening) > 0 and opening[0] == 0) :] - 1]
    after = text[closing[: len(closing) - int(len(closing) > 0 and closing[-1] == len(text) - 1)] + 1]
    beside = np.zeros(256, bool)
    beside[list(f"{quote}\r\n{delimiter}".encode())] = True
    return quotes if beside[before].all() and beside[after].all() else None


def _without_comments(text: bytes, dialect: _Dialect) -> bytes:
    """Return whole rows without the lines that begin with a sign, outside of quotes."""
    sign = dialect.comment.encode()
    if not sign or sign not in text:
        return text
    if not dialect.quote:
        return b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(sign))
    line = re.compile(re.escape(sign) + rb"[^\r\n]*+(?>\r\n?|\n|\Z)")
    rows = re.compile(
        rb"(?>(?!" + re.escape(sign) + rb")" + _row(dialect.delimiter, str(dialect.quote)) + rb")*+"
    )
    kept, place = [], 0
    while place < len(text):
        found = rows.match(text, place)
        end = found.end() if found else place
        comment = line.match(text, end)
        if comment is None:  # of rows without a line end, or whose quotes aren't closed
            kept.append(text[place:])
            break
        kept.append(text[place:end])
        place = comment.end()
    return b"".join(kept)


def _line_of(text: bytes, place: int, dialect: _Dialect) -> str:
    """Return such as `line 3`, where the row of values `place` begins, from 0. Without the comments of a file
    lines can't be counted."""
    row = place + dialect.has_header
    if dialect.comment:
        return f"row #{row + 1}"
    pattern = _row(dialect.delimiter, str(dialect.quote)) if dialect.quote else rb"[^\r\n]*(?>\r\n?|\n)"
    rows = (found.start() for found in re.finditer(pattern, text) if found[0].strip(b"\r\n"))
    start = next(itertools.islice(rows, row, None), len(text.rstrip(b"\r\n").rpartition(b"\n")[0]) + 1)
    ends = re.findall(rb"\r\n?|\n", text[:start])
    return f"line {len(ends) + 1}"


def _may_have_leading_zeros(text: bytes, dialect: _Dialect) -> bool:
    """Return whether a field may begin with 0 and another digit, or the mark of hexadecimal numbers."""
    data = np.frombuffer(text, np.uint8)
    if (data[:1] == ord("0")).all() and _FOLLOWING[data[1:2]].any():
        return True
    beginnings = {*f"{dialect.delimiter}{dialect.quote or ''}\r\n".encode()}
    is_beginning = np.zeros(256, bool)
    is_beginning[[*beginnings, ord(" ")]] = True
    befores = [each for each in sorted(beginnings | _SIGNS) if each in text]
    # Two bytes are compared at once, at even and at odd places: faster than looking at each zero.
    for first in (0, 1):
        pairs = (
            np.frombuffer(text, "<u2", (len(text) - first) // 2, first) if len(text) > first + 1 else data[:0]
        )
        for before in befores:
            ends = np.flatnonzero(pairs == (ord("0") << 8 | before)) * 2 + first + 2
            ends = ends[ends < len(data)]
            ends = ends[_FOLLOWING[data[ends]]]
            if before in _SIGNS:  # in dates they are amid a field
                ends = ends[(ends < 3) | is_beginning[data[ends - 3]]]
            if len(ends):
                return True
    return False


_SIGNS = {*b"+- "}
"""What may be between the beginning of a field and its number."""
_FOLLOWING = np.zeros(256, bool)
"""What follows a leading 0."""
_FOLLOWING[list(b"0123456789xX")] = True


def _has_leading_zeros(texts: Any) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, _LEADING_ZERO)).as_py())


_NAMES_OF_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


def _first_lines(beginning: str, quote: str | bool, comment: str | None) -> list[str]:
    """Return the first rows that are whole and have something."""
    # Quotes in comments open nothing.
    text = re.sub(rf"(?m)^{re.escape(comment)}.*$", "", beginning) if comment else beginning
    if quote:
        # Line ends within quotes don't end rows.
        text = re.sub(
            f"{quote}(?:[^{quote}]|{quote}{quote})*{quote}", lambda m: re.sub("[\r\n]", " ", m[0]), text
        )
    lines = [each for each in re.split(r"\r\n|\n|\r", text) if each.strip()]
    is_cut = len(beginning) >= _BEGINNING // 4 and len(lines) > 1
    return (lines[:-1] if is_cut else lines)[:_LINES]


def _split(line: str, delimiter: str, quote: str | bool) -> list[str]:
    if not quote:
        return line.split(delimiter)
    enclosed = rf"{quote}(?:[^{quote}]|{quote}{quote})*{quote}[^{re.escape(delimiter)}]*"
    return re.findall(rf"(?:^|{re.escape(delimiter)})({enclosed}|[^{re.escape(delimiter)}]*)", line)


def _unquoted(field: str) -> str:
    text = field.strip()
    return "" if text[:1] == '"' else text


def _count(line: str, delimiter: str) -> int:
    """Return how many delimiters a row has outside of quotes."""
    return len(_split(line, delimiter, '"')) - 1 if '"' in line else line.count(delimiter)


def _find_delimiter(lines: list[str]) -> str:
    """Return what separates the fields of rows: a comma, unless the header has none outside of quotes and has
    another sign, or all rows have as many of another sign and not of commas."""
    first = {by: _count(lines[0], by) if lines else 0 for by in _DELIMITERS}
    for by in _DELIMITERS:
        if first[by] and all(_count(line, by) == first[by] for line in lines):
            return by
    if first[","]:
        return ","
    most = max(_DELIMITERS, key=lambda by: first[by])
    return most if first[most] else ","


def _decoding_error(beginning: bytes, encoding: str) -> UnicodeDecodeError | None:
    try:
        codecs.getincrementaldecoder(encoding)().decode(beginning)
    except UnicodeDecodeError as error:
        return error
    return None


def _undecodable(path: object, encoding: str, found: str) -> SourceError:
    if encoding:
        return SourceError(f"{path} must be text in {encoding}. Received: {found}. Name another --encoding")
    return ColumnProblems(path, [_name_encoding(found)])


def _name_encoding(found: str) -> Problem:
    text = f"its text isn't UTF-8 ({found}); --encoding names the encoding, mostly cp1252 in the West"
    return Problem("", text, ("--encoding", "cp1252"))


def _is_changed(inferred: Any, kept: Any) -> bool:
    """Return whether values must be read again to be of another type than the one that Arrow infers."""
    return is_text(kept) and not is_text(inferred)


def _kept_type(inferred: Any) -> Any:
    """Return the type to read a column with, given the one that Arrow infers."""
    if pa.types.is_null(inferred):
        return pa.float64()
    if pa.types.is_timestamp(inferred):
        return pa.timestamp("us", inferred.tz)
    if is_text(inferred) or pa.types.is_binary(inferred):
        return pa.large_utf8()
    return inferred
