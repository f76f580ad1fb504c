"""WebDataset: archives of tar whose members make samples by their names, plain or packed by gzip.

`0001.png`, `0001.cls` and `0001.json` are one sample. An image is the column `image`, `.cls` the column
`label` (int64), `.txt` the column `text`, `.npy` a tensor named as that of .npy files. The keys of `.json`
are columns; those of objects in it are joined by dots. A part before the kind names the column instead:
`0001.left.png` is `left`. All samples have the members of the first one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tarfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from insitu.base.errors import DamagedImages, SizeNeeded, SourceError
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.images import IMAGE
from insitu.grid.sources.npy import read_values
from insitu.grid.sources.packing import open_unpacked
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.pictures import (
    MOST_THREADS,
    SUFFIXES,
    Shape,
    Undecodable,
    batch_size,
    decode,
    load_pillow,
    measure,
    suggest_shape,
)
from insitu.grid.sources.tables import TableBatch, make_tensors

_KINDS = {
    **{suffix[1:]: IMAGE for suffix in SUFFIXES},
    "cls": "cls",
    "txt": "txt",
    "json": "json",
    "npy": "npy",
}
"""Last part of a member's name -> what it holds."""
_NAMES = {IMAGE: IMAGE, "cls": "label", "txt": "text", "json": ""}
"""What it holds -> its column, unless its name says another."""
_SAMPLE_BYTES, _MOST_SAMPLES = 4 << 20, 256
"""Bytes, and samples, from which columns and their types follow."""
_CHUNK_BYTES, _CHUNK_SAMPLES = 512 << 10, 256
"""Bytes, and samples, that one thread decodes at a time."""
_MOST_MEMBER_BYTES = 2**31 - 1
_BUFFER_BYTES = 1 << 20
"""Bytes of an archive that are read at once."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Members that share their name up to its first dot."""

    #: The number of the sample in the archive.
    number: int
    #: The name, with its folders.
    key: str
    #: By the rest of the name: the bytes of each member.
    members: Mapping[str, bytes]
    #: Bytes of the archive's file that have been read.
    source_bytes: int


class WebdatasetTable:
    format: ClassVar[str] = "webdataset"
    suffixes: ClassVar[tuple[str, ...]] = (".tar", ".tar.gz", ".tgz")
    counts_rows = False
    missing: ClassVar[Mapping[str, int]] = {}
    notes = ()
    problems = ()

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        self._shape: Shape = options.images or (1, 1, 1)  # without --images there are none
        self._skips = options.skip_damaged
        #: What is wrong with each image whose sample was passed over.
        self.skipped: list[str] = []
        samples, held = list[_Sample](), 0
        with contextlib.closing(self._samples()) as found:
            for sample in found:
                samples.append(sample)
                held += sum(map(len, sample.members.values()))
                if len(samples) == _MOST_SAMPLES or held > _SAMPLE_BYTES:
                    break
        if not samples:
            raise SourceError(f"{path} has no members. Leave it out")
        self._members = _name_members(samples[0], path, options.column)
        images = [name for name, (kind, _) in self._members.items() if kind == IMAGE]
        if images:
            load_pillow()
            if options.images is None:
                known = (measure(io.BytesIO(s.members[n])) for s in samples for n in images if n in s.members)
                raise SizeNeeded(f"{path} with images", suggest_shape(known))
        for sample in samples:
            self._check_members(sample)
        self._types = self._infer_types(samples)
        self._first = self._find_first(samples)
        self.sample = self._make_batch([self._first], samples, self._types)
        self.schema = self.sample.schema
        read, size = samples[-1].source_bytes, path.stat().st_size
        # What is read ahead of the first samples counts, too.
        self.expected_rows = max(len(samples), round(len(samples) * size / max(1, read)))

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        problems: list[str] = []
        types = {name: _widened(kind, wanted.get(name)) for name, kind in self._types.items()}
        decode_samples = functools.partial(self._decode, types=types)
        with contextlib.ExitStack() as stack:
            samples = stack.enter_context(contextlib.closing(self._samples()))
            chunks = self._cut_chunks(samples, min(block_bytes, _CHUNK_BYTES), start)
            decoded = stack.enter_context(
                contextlib.closing(map_ordered(decode_samples, chunks, MOST_THREADS))
            )
            for last, batch, wrong in decoded:
                (self.skipped if self._skips else problems).extend(wrong)
                if batch is not None and not problems:
                    yield TableBatch(batch, last.source_bytes, last.number + 1)
        if problems:
            raise DamagedImages(tuple(problems))

    def _cut_chunks(self, samples: Iterator[_Sample], size: int, start: int) -> Iterator[list[_Sample]]:
        chunk, held = list[_Sample](), 0
        most = min(_CHUNK_SAMPLES, 8 * batch_size(self._shape))
        for sample in samples:
            if sample.number < start:
                continue
            chunk.append(sample)
            held += sum(map(len, sample.members.values()))
            if held >= size or len(chunk) == most:
                yield chunk
                chunk, held = [], 0
        if chunk:
            yield chunk

    def _decode(self, samples: Sequence[_Sample], types: Mapping[str, Any]) -> tuple[_Sample, Any, list[str]]:
        """Return (the last sample, those whose images are whole as a record batch, what is wrong)."""
        rows, problems = list[dict[str, Any]](), []
        for sample in samples:
            try:
                rows.append(self._read_sample(sample))
            except Undecodable as error:
                problems.append(str(error))
        return samples[-1], self._make_batch(rows, samples, types) if rows else None, problems

    def _read_sample(self, sample: _Sample) -> dict[str, Any]:
        """Return the value of each column. Raises Undecodable for an image, SourceError for other members."""
        self._check_members(sample)
        row: dict[str, Any] = {}
        for member, (kind, name) in self._members.items():
            data = sample.members[member]
            place = f"{self.path}: {sample.key}.{member}"
            if kind == IMAGE:
                try:
                    row[name] = decode(data, self._shape)
                except Undecodable as error:
                    raise Undecodable(f"{place} {error}") from error
                continue
            found = {name: _READERS[kind](data, place)} if kind != "json" else _read_json(data, place, name)
            twice = next((each for each in found if each in row), None)
            if twice is not None:
                raise SourceError(
                    f"{place}: each column comes from one member. Received: column {twice!r} from several. "
                    f"Rename one of them, such as the key in .json"
                )
            row |= found
        return row

    def _check_members(self, sample: _Sample) -> None:
        """Raise SourceError if a sample has other members than the first one."""
        if sample.members.keys() == self._members.keys():
            return
        lacks = [f".{name}" for name in self._members if name not in sample.members]
        more = [f".{name}" for name in sample.members if name not in self._members]
        differs = " and ".join(
            part
            for part in (f"lacks {', '.join(lacks)}" * bool(lacks), f"has {', '.join(more)}" * bool(more))
            if part
        )
        raise SourceError(
            f"{self.path}: all samples have the members of the first one: "
            f"{', '.join(f'.{name}' for name in self._members)}. Received: sample {sample.key!r}, which "
            f"{differs}. Leave that member out of all samples, or that sample"
        )

    def _infer_types(self, samples: Sequence[_Sample]) -> dict[str, Any]:
        """Return the type of Arrow for each column of a .json."""
        values: dict[str, list[Any]] = {}
        for sample in samples:
            for member, (kind, name) in self._members.items():
                if kind == "json":
                    place = f"{self.path}: {sample.key}.{member}"
                    for key, value in _read_json(sample.members[member], place, name).items():
                        values.setdefault(key, []).append(value)
        types = {}
        for key, found in values.items():
            try:
                kind = pa.array(found).type
            except (pa.ArrowException, OverflowError) as error:
                raise SourceError(
                    f"{self.path}: a key of .json has values of one type. Received: {key!r}, {error}. "
                    f"Correct it, or leave it out"
                ) from error
            types[key] = pa.float64() if pa.types.is_null(kind) else kind
        return types

    def _find_first(self, samples: Sequence[_Sample]) -> dict[str, Any]:
        """Return the first row whose images are whole. Raises DamagedImages if none is."""
        for sample in samples:
            with contextlib.suppress(Undecodable):
                return self._read_sample(sample)
        raise DamagedImages(tuple(self._decode(samples, self._types)[2]))

    def _make_batch(
        self, rows: Sequence[Mapping[str, Any]], samples: Sequence[_Sample], types: Mapping[str, Any]
    ) -> Any:
        """Return rows as a record batch. Raises SourceError if they differ from the first one."""
        between = f"from {samples[0].key!r} to {samples[-1].key!r}"
        for row in rows:
            if row.keys() != self._first.keys():
                differing = sorted(row.keys() ^ self._first.keys())
                raise SourceError(
                    f"{self.path}: all samples have the keys of .json that the first one has. Received: "
                    f"samples {between}, which differ in {', '.join(differing)}. Add what is missing, or "
                    f"leave "
                    f"these keys out of all"
                )
        arrays = []
        for name, first in self._first.items():
            values = [row[name] for row in rows]
            if name in types:
                try:
                    arrays.append(_cast(values, types[name]))
                except (pa.ArrowException, OverflowError) as error:
                    raise SourceError(
                        f"{self.path}: a key of .json has values of one type, which follows from the first "
                        f"samples: {name!r} is of {types[name]}. Received: {error}, in a sample {between}. "
                        f"Correct "
                        f"it, or leave the key out"
                    ) from error
            elif isinstance(first, np.ndarray):
                for value in values:
                    if (value.dtype, value.shape) != (first.dtype, first.shape):
                        raise SourceError(
                            f"{self.path}: column {name!r} has rows of {first.dtype}{list(first.shape)}, "
                            f"as in the "
                            f"first sample. Received: {value.dtype}{list(value.shape)} in a sample "
                            f"{between}. Pad or "
                            f"cut the arrays to one shape"
                        )
                arrays.append(make_tensors(np.array(values)))
            else:
                arrays.append(pa.array(values, pa.large_utf8() if isinstance(first, str) else pa.int64()))
        return pa.record_batch(arrays, names=list(self._first))

    def _samples(self) -> Generator[_Sample, None, None]:
        """Yield the samples in their order. Raises SourceError for an archive that isn't whole."""
        members: dict[str, bytes] = {}
        key, number = "", 0
        with _open_archive(self.path) as (archive, file):
            for member in archive:
                folder, slash, base = member.name.rpartition("/")
                if member.isdir() or base.startswith("."):  # such as ._0001.png of macOS
                    continue
                name, _, kind = base.partition(".")
                of = f"{folder}{slash}{name}"
                if members and of != key:
                    yield _Sample(number, key, members, file.tell())
                    members, number = {}, number + 1
                key = of
                _check_member(member, members, kind, self.path)
                members[kind] = _read_member(archive, member)
        if members:
            yield _Sample(number, key, members, self.path.stat().st_size)


class _Entry(tarfile.TarInfo):
    """A member's header. tarfile takes one that it can't read for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Entry:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from error


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[tuple[tarfile.TarFile, Any]]:
    """Yield (the archive, the file below it, whose position shows how much has been read)."""
    try:
        with (
            open_unpacked(path) as (stream, file),
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Entry, bufsize=_BUFFER_BYTES) as archive,
        ):
            yield archive, file
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise SourceError(
            f"{path} is no whole archive of tar: {error}. It is truncated or damaged, or has no end mark; "
            f"fetch it again"
        ) from error


def _check_member(member: tarfile.TarInfo, members: Mapping[str, bytes], kind: str, path: Path) -> None:
    last = kind.lower().rpartition(".")[2]
    problem = ""
    if not member.isreg():
        problem = "which is no file, such as a link"
    elif last not in _KINDS:
        problem = "of another kind"
    elif kind in members:
        problem = "twice in one sample"
    elif member.size > _MOST_MEMBER_BYTES:
        problem = f"of {member.size} bytes"
    if problem:
        raise SourceError(
            f"{path}: members of samples are files of at most 2 GiB whose names end in "
            f"{', '.join(f'.{each}' for each in _KINDS)}. Received: {member.name!r}, {problem}. Write the "
            f"archive without it, or read it by --reader webdataset"
        )


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    data = b"" if opened is None else opened.read()
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
    return data


def _name_members(first: _Sample, path: Path, tensor: str) -> dict[str, tuple[str, str]]:
    """Return (what it holds, its column) of each member of a sample. Raises SourceError."""
    found: dict[str, tuple[str, str]] = {}
    for member in first.members:
        before, _, last = member.rpartition(".")
        kind = _KINDS[last.lower()]
        name = before or _NAMES.get(kind, tensor)
        other = next((m for m, each in found.items() if each[1] == name), None)
        if other is not None:
            raise SourceError(
                f"{path}: each column comes from one member. Received: .{other} and .{member} for column "
                f"{name!r} of sample {first.key!r}. Rename one, such as 0001.left.png, or leave it out"
            )
        found[member] = kind, name
    return found


def _cast(values: Sequence[Any], kind: Any) -> Any:
    """Return values as an array of a type. Raises ArrowException if that would change them."""
    # With the type at once Arrow makes 1 of 1.5.
    found = pa.array(values)
    if _is_number(kind) and any(isinstance(value, bool) for value in values):
        raise pa.ArrowInvalid("values of bool")
    is_plain = found.type == kind or pa.types.is_null(found.type)
    if not is_plain and not (_is_number(found.type) and _is_number(kind)):
        raise pa.ArrowInvalid(f"values of {found.type}")
    return found.cast(kind)


def _is_number(kind: Any) -> bool:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _widened(kind: Any, wanted: Any) -> Any:
    """Return the type of a key of .json: float64 for whole numbers if other archives have floats."""
    return wanted if wanted is not None and _is_number(kind) and _is_number(wanted) else kind


def _read_class(data: bytes, place: str) -> int:
    try:
        number = int(data)
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError
        return number
    except ValueError:
        raise SourceError(
            f"{place} must be a whole number, the number of a class. Received: {data[:40]!r}. Number the "
            f"classes, or name the member .txt"
        ) from None


def _read_text(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{place} must be text in UTF-8. Received: {error}. Convert it") from error


_READERS: Mapping[str, Any] = {"cls": _read_class, "txt": _read_text, "npy": read_values}


def _read_json(data: bytes, place: str, prefix: str) -> dict[str, Any]:
    """Return the values of the keys of an object, those of objects in it by keys that dots join."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"{type(found).__name__} at its top")
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{place} must be a JSON object. Received: {error}. Correct it") from error
    values: dict[str, Any] = {}
    waiting = [(f"{prefix}.{key}" if prefix else key, value) for key, value in reversed(found.items())]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{key}.{inner}", each) for inner, each in reversed(value.items())]
        elif not isinstance(value, dict):
            values[key] = value
    return values
