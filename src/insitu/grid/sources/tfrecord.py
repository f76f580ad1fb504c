"""TFRecord files of tf.train.Example and tf.train.SequenceExample, plain or packed by gzip.

`--features` says which features become which columns. Checksums are verified and records decoded by threads.
A feature of bytes is the memory of an array, little-endian, or a text.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.base.wording import format_count
from insitu.grid.partitions import RAGGED, TEXT
from insitu.grid.sources.base import DTYPES, MOST_ROW_VALUES, Block, SourceOptions
from insitu.grid.sources.examples import BYTES, FLOAT, KINDS, Layout, Malformed, locate_features
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.record_files import RecordChunk, check_records, is_packed, read_chunks

_CHUNK_BYTES = 4 << 20
"""Bytes of records that are decoded at once, unless one is longer."""
_SAMPLE_BYTES = 64 << 10
"""Bytes of records that are read to find out how large records are."""
_MOST_LAYOUTS = 16
"""Layouts that records of one length are compared with, before each of them is walked through."""
_MOST_LOOKED_AT = 1000
"""Records that suggested features fit."""
_SHOWN = 12
"""Features of a record that a message names."""


class TfrecordSource:
    format: ClassVar[str] = "tfrecord"
    suffixes: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._packed = is_packed(path)
        sample = _CHUNK_BYTES if options.features is None else _SAMPLE_BYTES
        with contextlib.closing(read_chunks(path, self._packed, sample)) as chunks:
            chunk = next(chunks, None)
        if chunk is None:
            raise SourceError(f"{path} has no records. Leave it out")
        check_records(chunk, path)
        if options.features is None:
            raise _unnamed(path, chunk)
        self._features = parse_features(options.features)
        self.columns: tuple[Column, ...] = tuple(feature.column for feature in self._features)
        ChunkDecoder(chunk, path, self._features).decode()
        unpacked = chunk.end / max(1, chunk.source_bytes) if self._packed else 1.0
        total = max(chunk.end, path.stat().st_size * max(1.0, unpacked))
        self.expected_rows = max(1, round(len(chunk.starts) * total / chunk.end))

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        with contextlib.ExitStack() as stack:
            size = min(block_bytes, _CHUNK_BYTES)
            chunks = stack.enter_context(
                contextlib.closing(read_chunks(self.path, self._packed, size, start))
            )
            decoded = stack.enter_context(contextlib.closing(map_ordered(self._decode, chunks)))
            for chunk, columns in decoded:
                yield Block(columns, len(chunk.starts), chunk.source_bytes, chunk.end)

    def _decode(self, chunk: RecordChunk) -> tuple[RecordChunk, dict[str, Any]]:
        check_records(chunk, self.path)
        return chunk, ChunkDecoder(chunk, self.path, self._features).decode()


class ChunkDecoder:
    """Makes columns of the records of one chunk."""

    def __init__(self, chunk: RecordChunk, path: Path, features: tuple[RequestedFeature, ...]) -> None:
        self._chunk = chunk
        self._path = path
        self._features = features
        rows = len(chunk.starts)
        self._memory: npt.NDArray[np.uint8] = np.frombuffer(chunk.data, np.uint8)
        #: By name of a column with rows of fixed size: its values, filled layout by layout.
        self._values: dict[str, npt.NDArray[Any]] = {
            f.name: np.empty((rows, f.values), f.dtype) for f in features if not _is_variable(f)
        }
        #: By name of any other column: (rows, their bytes: uint8[rows, bytes of each]).
        self._pieces: dict[str, list[tuple[Any, npt.NDArray[np.uint8]]]] = {
            f.name: [] for f in features if _is_variable(f)
        }

    def decode(self) -> dict[str, Any]:
        """Return the columns as a Block holds them. Raises SourceError."""
        order = np.argsort(self._chunk.lengths, kind="stable")
        changes = np.flatnonzero(np.diff(self._chunk.lengths[order])) + 1
        for rows in np.split(order, changes):
            self._decode_rows(rows)
        return {f.name: self._column(f) for f in self._features}

    def _decode_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Decode records of one length."""
        length = int(self._chunk.lengths[rows[0]])
        for _ in range(_MOST_LAYOUTS if len(rows) > 1 else 0):
            layout = self._find_layout(int(rows[0]), length)
            windows = sliding_window_view(self._memory, length) if length else self._memory[:, None][:, :0]
            records = windows[self._chunk.starts[rows]]
            matching = layout.matches(records)
            self._take(layout, rows[matching], records if matching.all() else records[matching])
            rows = rows[~matching]
            if not len(rows):
                return
        for row in rows.tolist():
            start = int(self._chunk.starts[row])
            layout = self._find_layout(row, length)
            self._take(layout, np.array([row]), self._memory[None, start : start + length])

    def _find_layout(self, row: int, length: int) -> Layout:
        start = int(self._chunk.starts[row])
        record = self._chunk.data[start : start + length]
        try:
            return Layout(record, locate_features(record))
        except Malformed as error:
            raise SourceError(
                f"{self._path}: {self._chunk.place(row)} is no tf.train.Example or SequenceExample: {error}. "
                f"Import files of such records only"
            ) from error

    def _take(self, layout: Layout, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Take the values of all columns from records of one layout."""
        for feature in self._features:
            values = self._take_feature(feature, layout, rows, records)
            if _is_variable(feature):
                raw = np.ascontiguousarray(values).reshape(len(rows), -1).view(np.uint8)
                self._pieces[feature.name].append((rows, raw.reshape(len(rows), -1)))
            else:
                self._values[feature.name][rows] = values

    def _take_feature(
        self,
        feature: RequestedFeature,
        layout: Layout,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
    ) -> npt.NDArray[Any]:
        located = layout.features.get(feature.feature)
        if located is None:
            if feature.shape is None:
                return np.empty((len(rows), 0), feature.dtype)
            problem = f"it lacks the feature; it has {describe(layout)}"
            raise self._error(rows[0], feature, f"{problem}. {_advise_any_length(feature)}")
        values = layout.take(records, feature.feature)
        count = layout.count(feature.feature)
        if feature.dtype == TEXT:
            if located.kind != BYTES or count != 1:
                raise self._error(
                    rows[0], feature, f"a text is one value of bytes; it is {_shape(located.kind, count)}"
                )
            return values
        dtype = np.dtype(feature.dtype)
        if located.kind == BYTES:
            return self._cast_bytes(feature, dtype, values, rows)
        if (located.kind == FLOAT) != (dtype.kind == "f"):
            advice = "float32" if located.kind == FLOAT else "int64"
            fix = f"it is {_shape(located.kind, count)}. Ask for such as {feature.name}:{advice}"
            raise self._error(rows[0], feature, fix)
        if feature.shape is not None and count != feature.values:
            wanted, found = format_count(feature.values, "value"), _shape(located.kind, count)
            problem = f"a row of its column has {wanted}; it is {found}. {_advise_any_length(feature)}"
            raise self._error(rows[0], feature, problem)
        return self._cast_numbers(feature, dtype, values, rows)

    def _cast_bytes(
        self, feature: RequestedFeature, dtype: np.dtype[Any], values: npt.NDArray[np.uint8], rows: Any
    ) -> npt.NDArray[Any]:
        size = values.shape[1]
        wanted = None if feature.shape is None else feature.values * dtype.itemsize
        if size % dtype.itemsize or wanted not in (None, size):
            needs = f"{wanted} bytes" if wanted is not None else f"a multiple of {dtype.itemsize} bytes"
            raise self._error(rows[0], feature, f"a row of its column has {needs}; it has {size}")
        if dtype.kind == "b" and size and int(values.max()) > 1:
            row = int(np.argmax(values.max(axis=1) > 1))
            raise self._error(
                rows[row], feature, f"a bool is a byte of 0 or 1; one is {int(values[row].max())}"
            )
        found = np.ascontiguousarray(values).view(dtype.newbyteorder("<")) if size else values.astype(dtype)
        return found.astype(dtype, copy=False)

    def _cast_numbers(
        self, feature: RequestedFeature, dtype: np.dtype[Any], values: npt.NDArray[Any], rows: Any
    ) -> npt.NDArray[Any]:
        if dtype.kind in "iub" and dtype != np.int64:
            least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            outside = (values < least) | (values > min(int(most), 2**63 - 1))
            if outside.any():
                row, place = np.argwhere(outside)[0].tolist()
                raise self._error(
                    rows[row],
                    feature,
                    f"values of {dtype} are in [{least}, {most}]; one is {values[row, place]}",
                )
        return values.astype(dtype, copy=False)

    def _column(self, feature: RequestedFeature) -> Any:
        if not _is_variable(feature):
            return self._values[feature.name].reshape(-1, *(feature.shape or ()))
        pieces = self._pieces[feature.name]
        lengths = np.zeros(len(self._chunk.starts), np.int64)
        for rows, raw in pieces:
            lengths[rows] = raw.shape[1]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        data = np.empty(int(offsets[-1]), np.uint8)
        for rows, raw in pieces:
            if len(rows) == 1:
                data[offsets[rows[0]] : offsets[rows[0] + 1]] = raw[0]
            elif raw.shape[1]:
                sliding_window_view(data, raw.shape[1], writeable=True)[offsets[rows]] = raw
        kind = pa.large_utf8() if feature.dtype == TEXT else pa.large_binary()
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        array = pa.Array.from_buffers(kind, len(lengths), buffers)
        if feature.dtype == TEXT:
            self._check_texts(array, feature, data, offsets)
        return array

    def _check_texts(self, array: Any, feature: RequestedFeature, data: Any, offsets: Any) -> None:
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            for row in range(len(array)):
                try:
                    bytes(data[offsets[row] : offsets[row + 1]]).decode()
                except UnicodeDecodeError as error:
                    raise self._error(
                        row, feature, f"text is in UTF-8: {error.reason}. Ask for {feature.name}:uint8[*]"
                    ) from error
            raise

    def _error(self, row: Any, feature: RequestedFeature, problem: str) -> SourceError:
        return SourceError(
            f"{self._path}: feature {feature.feature!r} of {self._chunk.place(int(row))} must fit "
            f"--features {feature}: {problem}. Correct --features, or leave the file out"
        )


def _advise_any_length(feature: RequestedFeature) -> str:
    dtype = "uint8" if feature.dtype == TEXT else feature.dtype
    return f"If records differ, ask for {replace(feature, dtype=dtype, shape=None)}"


def _is_variable(feature: RequestedFeature) -> bool:
    return feature.shape is None or feature.dtype == TEXT


def _shape(kind: int, count: int) -> str:
    return f"a {KINDS[kind]} of {format_count(count, 'value')}"


def describe(layout: Layout) -> str:
    """Return the features of a record, for messages."""
    named = [f"{key} ({_shape(f.kind, layout.count(key))})" for key, f in sorted(layout.features.items())]
    return ", ".join(named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "") if named else "none"


def _unnamed(path: Path, chunk: RecordChunk) -> SourceError:
    """Return the error for an import without --features, with some that fit the records of `chunk`."""
    records = [chunk.data[s : s + n] for s, n in zip(chunk.starts, chunk.lengths, strict=True)][
        :_MOST_LOOKED_AT
    ]
    layouts = []
    for row, record in enumerate(records):
        try:
            layouts.append(Layout(record, locate_features(record)))
        except Malformed as error:
            return SourceError(
                f"{path}: {chunk.place(row)} is no tf.train.Example or SequenceExample: {error}. Import "
                "files of "
                f"such records only"
            )
    keys = sorted({key for layout in layouts for key in layout.features})
    shown = ",".join(_suggest(key, layouts, records) for key in keys)
    return SourceError(
        f"TFRecord files don't say which columns their features make. Received: {path} without --features. "
        f"Pass such as --features '{shown or 'NAME:DTYPE[SHAPE]=FEATURE'}', which fits its first "
        f"{format_count(len(records), 'record')}; a feature of bytes may be an array of any dtype"
    )


def _suggest(key: str, layouts: Sequence[Layout], records: Sequence[bytes]) -> str:
    """Return a column for a feature of some records: of rows of any length if they differ, or lack it."""
    having = [
        (layout, record) for layout, record in zip(layouts, records, strict=True) if key in layout.features
    ]
    kind, counts = having[0][0].features[key].kind, {layout.count(key) for layout, _ in having}
    is_equal = len(counts) == 1 and len(having) == len(layouts)
    if kind == BYTES:
        is_text = is_equal and counts == {1} and all(_is_text(key, *each) for each in having)
        return f"{key}:{TEXT}" if is_text else f"{key}:uint8[*]"
    shape = "[*]" if not is_equal else "" if counts == {1} else f"[{counts.pop()}]"
    return f"{key}:{'float32' if kind == FLOAT else 'int64'}{shape}"


def _is_text(key: str, layout: Layout, record: bytes) -> bool:
    raw = layout.take(np.frombuffer(record, np.uint8)[None], key)
    with contextlib.suppress(UnicodeDecodeError):
        return raw.tobytes().decode().isprintable()
    return False


# `--features`: which features of TFRecord files become which columns. Pure


_ONE = re.compile(r"\s*([^\s:=,\[\]]+)\s*:\s*([a-z0-9]+)\s*(?:\[([^\]]*)\])?\s*(?:=\s*([^,]+?))?\s*")
_EXAMPLE = "image:uint8[28,28]=image_raw,label:int64"
_MOST_SIDE = 1024


@dataclass(frozen=True, slots=True)
class RequestedFeature:
    """One feature of a tf.train.Example, and the column that it becomes."""

    #: The name of the column.
    name: str
    #: A dtype of NumPy, or "str".
    dtype: str
    #: Lengths of a row's axes; None: rows of different lengths.
    shape: tuple[int, ...] | None
    #: The feature's key in the records.
    feature: str

    @property
    def column(self) -> Column:
        if self.shape is None:
            return Column(self.name, self.dtype + RAGGED)
        return Column(self.name, self.dtype, self.shape)

    @property
    def values(self) -> int:
        """Values of a row of fixed shape."""
        return math.prod(self.shape or ())

    def __str__(self) -> str:
        shape = "*" if self.shape is None else ",".join(map(str, self.shape))
        return f"{self.name}:{self.dtype}{f'[{shape}]' if shape else ''}={self.feature}"


def parse_features(text: str) -> tuple[RequestedFeature, ...]:
    """Return what `NAME:DTYPE[SHAPE]=FEATURE,...` asks for. Raises InputError.

    SHAPE is left out for one value a row, and `*` for rows of different lengths. FEATURE is NAME by default.
    """
    parts = re.split(r",(?![^\[]*\])", text)
    found = tuple(_parse_one(part, text) for part in parts)
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--features names each column once. Received: {twice} twice, in {text!r}")
    return found


def _parse_one(part: str, text: str) -> RequestedFeature:
    match = _ONE.fullmatch(part)
    if match is None:
        raise InputError(
            f"--features lists columns as NAME:DTYPE[SHAPE]=FEATURE, such as {_EXAMPLE}. Received: {part!r} "
            f"in "
            f"{text!r}"
        )
    name, dtype, shape, feature = match.groups()
    if dtype not in (*DTYPES, TEXT):
        raise InputError(
            f"The dtype of a column is one of {', '.join(DTYPES)} or {TEXT}. Received: {dtype!r} in {text!r}"
        )
    lengths = _parse_shape(shape, text)
    if dtype == TEXT and lengths != ():
        raise InputError(
            f"A column of text has one text a row. Received: {part.strip()!r}. Leave out its shape"
        )
    return RequestedFeature(name, dtype, lengths, feature or name)


def _parse_shape(shape: str | None, text: str) -> tuple[int, ...] | None:
    if shape is None or not shape.strip():
        return ()
    if shape.strip() == "*":
        return None
    lengths = [part.strip() for part in shape.split(",")]
    numbers = tuple(int(part) if re.fullmatch(r"[0-9]{1,10}", part) else 0 for part in lengths)
    if 0 in numbers or math.prod(numbers) > MOST_ROW_VALUES:
        raise InputError(
            f"The shape of a row has whole numbers, 1 at least, or is * for rows of different lengths. "
            f"Received: "
            f"[{shape}] in {text!r}"
        )
    return numbers


def check_reading(features: str | None, render: int | None) -> None:
    """Raise InputError for --features or --render that no file can be read with."""
    if features is not None:
        parse_features(features)
    if render is not None and not 1 <= render <= _MOST_SIDE:
        raise InputError(
            f"--render is the side of an image in pixels, in [1, {_MOST_SIDE}]. Received: {render}"
        )
