"""JSON lines: an object on each line. Packed files are unpacked on the way.

Types follow from the first 2 MiB of each file, as Arrow infers them; times in ISO's form are times. With
`--render N` a key `drawing`, which
holds strokes as in the Quick, Draw! data set, becomes an image.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from insitu.base.errors import SourceError
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.column_options import DTYPES
from insitu.grid.sources.drawings import Strokes, fit_square, render
from insitu.grid.sources.lossy import find_lossy, list_large, list_long, texts_of_json
from insitu.grid.sources.ndjson_rows import find_misfit, write_texts
from insitu.grid.sources.packing import Lines, add_packings, is_packed, read_lines
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.table_layout import ColumnProblems, Problem, flatten_schema
from insitu.grid.sources.tables import TableBatch, flatten_batch, is_of_the_system

DRAWING = "drawing"
"""The key of strokes, as the data set has it."""
_SAMPLE_BYTES = 2 << 20
"""Bytes from which types follow."""
_CHUNK_BYTES = 4 << 20
"""Bytes of text that are parsed at once, unless a line is longer."""
_MOST_DEPTH = 64
"""Brackets that may be open at once: a type of more would overflow the stack of Arrow."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A text of JSON. One without an end takes all that follows, so that looking for it takes one pass."""
_MOST_COORDINATE = 1_000_000
_IMAGES_BYTES = 8 << 20
"""Bytes of images that one chunk makes, about."""
_ZONE = r"\d(Z|[+-]\d\d:?\d\d)$"
"""Ends a time that has a zone."""
_SIGNS = (ord("+"), ord("-"))
_SEPARATORS = (ord(":"), ord("-"))
_CHANGED = re.compile(r"Column\(/(.+?)\) changed from (\w+) to (\w+)( in row \d+)")
_STROKES = pa.list_(pa.list_(pa.list_(pa.float64())))


class NdjsonTable:
    format: ClassVar[str] = "ndjson"
    suffixes: ClassVar[tuple[str, ...]] = add_packings(".ndjson", ".jsonl")
    counts_rows = False
    missing: ClassVar[Mapping[str, int]] = {}
    notes = ()

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._side = options.render
        with contextlib.closing(self._lines(_SAMPLE_BYTES, 0)) as lines:
            sample = next((chunk for chunk in lines if chunk.text.strip()), None)
        if sample is None:
            raise SourceError(f"{path} has no lines. Leave it out")
        _check_text(sample.text, path)
        given = options.fields.dtypes
        #: Columns that the user wants as floats: what these lose is meant.
        self._floats = {name for name, dtype in given.items() if dtype.startswith("float")}
        #: Columns that the user wants as text, whichever values they have.
        self._texts = {name for name, dtype in given.items() if dtype == "str"}
        #: Columns of whole numbers that int64 doesn't hold.
        self._long: list[str] = []
        self._schema = pa.schema([])
        self._schema = self._infer_schema(sample)
        for name in sorted(given.keys() - dict(flatten_schema(self._schema)).keys()):
            if self._has_key(name):
                kind = pa.large_utf8() if given[name] not in DTYPES else pa.from_numpy_dtype(given[name])
                self._schema = pa.schema(_with_kind(list(self._schema), name, kind))
        mixed = [each for each in self._read_zones(sample) if each.column not in options.fields.dtypes]
        batch = self._parse(sample, self._schema)
        if isinstance(batch, Exception):
            raise self._explain(batch, 0, sample) from batch
        self.sample, self.schema = batch, batch.schema
        self._long = list_long(self._texts_of_large(sample, batch))
        self.problems = [*mixed, *self._list_lossy(sample, batch)]
        unpacked = sample.end / max(1, sample.source_bytes) if is_packed(path) else 1.0
        # Small drawings make large images.
        each = sample.end / max(1, batch.num_rows)
        fitting = _IMAGES_BYTES // self._side**2 * each if self._side else _CHUNK_BYTES
        self._chunk_bytes = max(1, min(_CHUNK_BYTES, int(fitting)))
        total = max(sample.end, path.stat().st_size * max(1.0, unpacked))
        self.expected_rows = max(1, round(batch.num_rows * total / sample.end))

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        rows_before: int | None = None if start else 0
        # Numbers that only a decimal holds are text exactly as such.
        types = dict(wanted)
        for name in self._long:
            if wanted.get(name) == pa.large_utf8():
                types[name] = pa.decimal128(38)
        schema = pa.schema([_with_types(each, each.name, types) for each in self._schema])

        def read(chunk: Lines) -> tuple[Lines, Any]:
            batch = self._parse(chunk, schema) if chunk.text.strip() else None
            if isinstance(batch, pa.RecordBatch):
                problems = [*self._list_mixed(chunk, schema), *self._list_lossy(chunk, batch)]
                if problems:
                    return chunk, ColumnProblems(self.path, problems)
            return chunk, batch

        with contextlib.ExitStack() as stack:
            chunks = stack.enter_context(
                contextlib.closing(self._lines(min(block_bytes, self._chunk_bytes), start))
            )
            parsed = stack.enter_context(contextlib.closing(map_ordered(read, chunks)))
            for chunk, batch in parsed:
                if isinstance(batch, Exception):
                    raise self._explain(batch, rows_before, chunk) from batch
                if batch is not None and batch.num_rows:
                    yield TableBatch(batch, chunk.source_bytes, chunk.end)
                    rows_before = None if rows_before is None else rows_before + batch.num_rows

    def _parse(self, chunk: Lines, schema: Any) -> Any:
        """Return the objects of a chunk as a record batch, or what parsing raised."""
        try:
            batch = _read_objects(chunk.text, schema)
        except (pa.ArrowException, OSError, IndexError) as error:
            texts = self._texts & dict(flatten_schema(schema)).keys()
            if not texts:
                return error
            fields = list(schema)
            for name in texts:
                fields = _with_kind(fields, name, pa.large_utf8())
            try:
                batch = _read_objects(write_texts(chunk.text, texts), pa.schema(fields))
            except (ValueError, RecursionError, OSError, IndexError):  # Arrow's are of ValueError
                return error
        if not self._side:
            return batch
        images = render(self._strokes(batch.column(DRAWING)), self._side)
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
        return batch.set_column(batch.schema.get_field_index(DRAWING), DRAWING, tensors)

    def _list_lossy(self, chunk: Lines, batch: Any) -> list[Problem]:
        """Return the columns of float64 with whole numbers that it doesn't hold, such as long ids."""
        found, kinds = self._texts_of_large(chunk, batch), dict(flatten_schema(self._schema))
        # Those beside numbers with decimals can't be text as they are written.
        mixed = {name for name in found if pa.types.is_float64(kinds[name])} - {*self._long}
        return find_lossy({n: (texts, in_list or n in mixed) for n, (texts, in_list) in found.items()})

    def _texts_of_large(self, chunk: Lines, batch: Any) -> dict[str, tuple[Any, bool]]:
        """Return (the numbers as they are written, whether they are in lists) of columns with large ones."""
        found = list_large(flatten_batch(batch))
        large = {name: in_list for name, in_list in found.items() if name not in self._floats}
        text = chunk.text.decode(errors="replace") if large else ""
        return {name: (texts_of_json(text, name), in_list) for name, in_list in large.items()}

    def _read_zones(self, sample: Lines) -> list[Problem]:
        """Note that times are in UTC if all have a zone, which Arrow reads and forgets. Returns the columns
        of which some have none."""
        zones = self._find_zones(sample, self._schema)
        kinds = dict(flatten_schema(self._schema))
        kinds |= {
            name: pa.timestamp(kinds[name].unit, "UTC") for name, zone in zones.items() if zone == {True}
        }
        self._schema = pa.schema([_with_types(each, each.name, kinds) for each in self._schema])
        return [_make_mixed(name) for name, zone in zones.items() if len(zone) > 1]

    def _list_mixed(self, chunk: Lines, schema: Any) -> list[Problem]:
        """Return the columns of times that have a zone in the first lines and none in some of these, or the
        other way round."""
        kinds = {n: kind for n, kind in flatten_schema(schema) if pa.types.is_timestamp(kind)}
        with_zone = {kind.tz is not None for kind in kinds.values()}
        if not any(_may_have_times(chunk.text, not zone) for zone in with_zone):
            return []
        zones = self._find_zones(chunk, schema)
        return [_make_mixed(name) for name, zone in zones.items() if zone - {kinds[name].tz is not None}]

    def _find_zones(self, chunk: Lines, schema: Any) -> dict[str, set[bool]]:
        """Return whether values have a zone, of each column of times: {True, False} if some have."""
        kinds = dict(flatten_schema(schema))
        times = {name for name, kind in kinds.items() if pa.types.is_timestamp(kind)}
        if not times:
            return {}
        texts = kinds | dict.fromkeys(times, pa.large_utf8())
        batch = self._parse(chunk, pa.schema([_with_types(each, each.name, texts) for each in schema]))
        if isinstance(batch, Exception):
            raise self._explain(batch, None if chunk.start else 0, chunk) from batch
        flat = flatten_batch(batch)
        found = {n: pc.match_substring_regex(flat.column(n).drop_null(), _ZONE) for n in times}
        return {name: set(pc.unique(values).to_pylist()) for name, values in found.items()}

    def _infer_schema(self, sample: Lines) -> Any:
        """Return the types that values of the first lines have. Raises SourceError."""
        _check_depth(sample.text, self.path)
        try:
            inferred = _read_objects(sample.text, None).schema
        except (pa.ArrowException, OSError) as error:
            try:
                inferred = _read_objects(write_texts(sample.text, self._texts), None).schema
            except (ValueError, RecursionError, OSError):
                raise self._explain(error, 0, sample) from error
        if self._side and DRAWING not in inferred.names:
            raise SourceError(
                f"--render makes an image of the key {DRAWING!r}. Received: {self.path} with the keys "
                f"{', '.join(inferred.names) or 'none'}. Leave --render out"
            )
        fields = []
        for field in inferred:
            kind = field.type
            if self._side and field.name == DRAWING:
                kind = _STROKES
            elif not self._side and field.name == DRAWING and _depth_of_lists(kind) == 3:
                raise ColumnProblems(
                    self.path,
                    [
                        Problem(
                            DRAWING, "holds strokes, which --render 28 makes images of", ("--render", "28")
                        )
                    ],
                )
            fields.append(pa.field(field.name, kind))
        return pa.schema(fields)

    def _has_key(self, name: str) -> bool:
        """Return whether some line may have a key."""
        key = f'"{name.rpartition(".")[2]}"'.encode()
        with contextlib.closing(self._lines(_CHUNK_BYTES, 0)) as chunks:
            return any(key in chunk.text for chunk in chunks)

    def _strokes(self, values: Any) -> Strokes:
        """Return the strokes of drawings. Raises SourceError if they aren't lists of lists x and y."""
        if values.null_count or values.flatten().null_count or values.flatten().flatten().null_count:
            raise SourceError(
                f"{self.path}: each object needs a {DRAWING!r}, a list of strokes. Drop those without"
            )
        strokes = values.flatten()
        axes = strokes.flatten()
        counts = pc.list_value_length(strokes).to_numpy(zero_copy_only=False)
        lengths = pc.list_value_length(axes).to_numpy(zero_copy_only=False)
        # The third axis of drawings that aren't simplified is time.
        firsts = np.cumsum(counts) - counts
        uneven = (counts < 2) | (counts > 3)
        if not uneven.any():
            uneven = lengths[firsts] != lengths[firsts + 1]
        if uneven.any():
            stroke = int(np.argmax(uneven))
            raise SourceError(
                f"{self.path}: a stroke is a list of x coordinates and one of as many y coordinates. "
                f"Received: "
                f"{str(strokes[stroke].as_py())[:80]}. Correct it, or drop the drawing"
            )
        numbers = axes.flatten().to_numpy(zero_copy_only=False)
        begins = np.cumsum(lengths) - lengths
        x, y = (_pick(numbers, begins[firsts + axis], lengths[firsts + axis]) for axis in (0, 1))
        for axis in (x, y):
            wrong = ~(np.abs(axis) <= _MOST_COORDINATE)
            if wrong.any():
                raise SourceError(
                    f"{self.path}: coordinates of {DRAWING!r} are numbers in [-{_MOST_COORDINATE}, "
                    f"{_MOST_COORDINATE}]. Received: {axis[wrong][0]}. Correct it, or drop the drawing"
                )
        per_drawing = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        return fit_square(Strokes(x, y, _bounds(lengths[firsts]), _bounds(per_drawing)))

    def _lines(self, chunk_bytes: int, start: int) -> Generator[Lines, None, None]:
        return read_lines(self.path, chunk_bytes, start, "JSON lines have an object on each line")

    def _explain(self, error: Exception, rows_before: int | None, chunk: Lines) -> Exception:
        """Return what to raise for an error of parsing, with the row's number in the file, not the chunk."""
        if isinstance(error, ColumnProblems) or (isinstance(error, OSError) and is_of_the_system(error)):
            return error
        mixed = _CHANGED.search(str(error))
        is_known = len(self._schema) > 0
        problems = find_misfit(chunk.text, self._schema, rows_before) if is_known else []
        if mixed and not is_known:
            name, has = mixed[1].replace("/", "."), f"has a {mixed[2]} and then a {mixed[3]}{mixed[4]}"
            problems = [Problem(name, f"{has}, counted from 0", ("--dtype", f"{name}=str"))]
        if problems and not self._side:
            return ColumnProblems(self.path, problems)

        def number(found: re.Match[str]) -> str:
            return "" if rows_before is None else f"{found[1]}{int(found[2]) + rows_before}"

        text = re.sub("( in row )([0-9]+)", number, str(error)) or type(error).__name__
        if " in row " not in text:
            text += f", in the lines from byte {chunk.start} to {chunk.end}"
        return SourceError(
            f"{self.path}: {text}. Each line is a JSON object, with the same keys and types, which follow "
            f"from the "
            f"first {_SAMPLE_BYTES >> 20} MiB of each file. Correct that row, or name the format with "
            f"--format"
        )


def _read_objects(text: bytes, schema: Any) -> Any:
    """Return objects as a record batch. `schema`: None: it is inferred. Raises what Arrow does."""
    read = pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = pa_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
    )
    with pa.BufferReader(text) as stream:
        return pa_json.read_json(stream, read, parse).combine_chunks().to_batches()[0]


def _with_kind(fields: list[Any], name: str, kind: Any) -> list[Any]:
    """Return the fields of a schema with a key, named as in user.age, of a type."""
    for place, each in enumerate(fields):
        new = kind
        if pa.types.is_struct(each.type) and name.startswith(f"{each.name}."):
            below = [each.type.field(i) for i in range(each.type.num_fields)]
            new = pa.struct(_with_kind(below, name.removeprefix(f"{each.name}."), kind))
        elif each.name != name:
            continue
        return [*fields[:place], pa.field(each.name, new), *fields[place + 1 :]]
    return [*fields, pa.field(name, kind)]


def _with_types(field: Any, name: str, wanted: Mapping[str, Any]) -> Any:
    """Return a field with the types that its columns are read as. Numbers stay as they are found."""
    kind = field.type
    if pa.types.is_struct(kind):
        inner = [kind.field(i) for i in range(kind.num_fields)]
        kind = pa.struct([_with_types(each, f"{name}.{each.name}", wanted) for each in inner])
    elif pa.types.is_null(kind) or pa.types.is_timestamp(kind) or pa.types.is_int64(kind):
        to = wanted.get(name)
        if to is not None and (not pa.types.is_int64(kind) or pa.types.is_floating(to)):
            kind = to
        elif to is None and pa.types.is_null(kind):
            kind = pa.float64()
    if pa.types.is_int64(kind) or pa.types.is_float64(kind):
        to = wanted.get(name)
        kind = to if to is not None and (to == pa.uint64() or pa.types.is_decimal(to)) else kind
    return pa.field(field.name, kind)


def _make_mixed(name: str) -> Problem:
    return Problem(name, "has times with a zone and others without one", ("--dtype", f"{name}=str"))


def _may_have_times(text: bytes, with_zone: bool) -> bool:
    """Return whether a text of JSON may have times with a zone, or without one: a look at what is before each
    quotation mark, which costs a tenth of parsing."""
    data = np.frombuffer(b" " * 16 + text, np.uint8)
    ends = np.flatnonzero(data == ord('"'))
    ends = ends[ends >= 16]
    last = data[ends - 1]
    is_digit = (last >= ord("0")) & (last <= ord("9"))
    if with_zone and (last == ord("Z")).any():
        return True
    ends = ends[is_digit]
    hours, four_digits = data[ends - 6], data[ends - 5]
    is_offset = (np.isin(hours, _SIGNS) & (data[ends - 3] == ord(":"))) | np.isin(four_digits, _SIGNS)
    if with_zone:
        return bool(is_offset.any())
    # Seconds, minutes, a date; or a fraction of seconds.
    is_time = np.isin(data[ends - 3], _SEPARATORS)
    for digits in range(1, 10):
        is_time |= (data[ends - digits - 1] == ord(".")) & (data[ends - digits - 4] == ord(":"))
    return bool((is_time & ~is_offset).any())


def _check_text(text: bytes, path: Path) -> None:
    if text.lstrip()[:1] != b"{":
        raise SourceError(
            f"{path} must have a JSON object on each line. Received: {text.lstrip()[:20]!r} at its "
            f"beginning. If it "
            f"is one JSON document, write its objects on lines of their own"
        )


def _check_depth(text: bytes, path: Path) -> None:
    """Raise SourceError if more brackets are open at once, outside of texts, than Arrow may be given.

    Arrow ignores line ends, so a value that spans several lines counts as one.
    """
    data = np.frombuffer(_TEXT.sub(b"", text), np.uint8)
    steps = np.zeros(256, np.int8)
    steps[[ord("["), ord("{")]], steps[[ord("]"), ord("}")]] = 1, -1
    depth = np.cumsum(steps[data], dtype=np.int32)
    closed = np.minimum(np.minimum.accumulate(depth), 0)
    if (depth - closed).max(initial=0) > _MOST_DEPTH:
        raise SourceError(
            f"{path}: lists in lists may be {_MOST_DEPTH} deep. Received: a value of more opening brackets. "
            f"Keep "
            f"numbers, text, and lists of numbers"
        )


def _depth_of_lists(kind: Any) -> int:
    depth = 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _bounds(lengths: Any) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def _pick(values: Any, begins: Any, lengths: Any) -> npt.NDArray[np.float64]:
    """Return the values of ranges, one after another."""
    bounds = _bounds(lengths)
    places = np.repeat(begins - bounds[:-1], lengths) + np.arange(bounds[-1])
    picked: npt.NDArray[np.float64] = values[places.astype(np.int64)]
    return picked
