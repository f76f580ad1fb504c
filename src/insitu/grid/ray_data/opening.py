"""Opens the files of a reader of Ray Data as sources of an import.

One reading of Ray goes over all files, by as many tasks as there are processors. Rows come file by file, in
the order of the files' names, and in the order of each file, however many nodes there are and whichever task
ends first. That they do is checked by the file that each row names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa

from insitu.base.errors import InputError, SourceError
from insitu.base.wording import format_count
from insitu.grid.ray_data.readers import ReaderRequest
from insitu.grid.ray_data.session import RaySession, has_cluster
from insitu.grid.sources import (
    ArrowSource,
    FileGroup,
    Member,
    SourceOptions,
    TableBatch,
    UrlFile,
    arrange_tables,
    find_sources,
    malformed_as_error,
    mixed_shapes,
)

_SAMPLE_ROWS = 64


def name_for_ray(file: Member) -> str:
    return file.url if isinstance(file, UrlFile) else str(file)


def _names_by_ray(file: Member) -> set[str]:
    """Return how Ray may name a file that it has read: URLs lose their protocol."""
    name = name_for_ray(file)
    return {name, name.partition("://")[2] or name}


class RayStream:
    """The rows of groups of files, read once from one group on."""

    def __init__(
        self, session: RaySession, groups: Sequence[FileGroup], *, keeps_path: bool, without: Collection[str]
    ) -> None:
        self._session, self._groups = session, groups
        self._keeps_path, self._without = keeps_path, without
        self._number = {
            name: number
            for number, group in enumerate(groups)
            for file in group.files
            for name in _names_by_ray(file)
        }
        #: The group whose rows come next; None: nothing is being read.
        self._next: int | None = None
        self._rows: Iterator[tuple[int, Any]] = iter(())
        self._ahead: tuple[int, Any] | None = None

    def tables_of(self, number: int) -> Iterator[Any]:
        """Yield the rows of a group as Arrow tables. Raises SourceError if Ray can't read them, or gives
        them in another order."""
        if self._next != number:
            self.close()
            self._rows = self._read(number)
        self._next = None  # until all rows of this group have been taken
        while True:
            found, self._ahead = self._ahead or next(self._rows, None), None
            if found is None or found[0] != number:
                self._ahead, self._next = found, number + 1
                return
            yield found[1]

    def close(self) -> None:
        """End the reading."""
        self._next = self._ahead = None
        rows, self._rows = self._rows, iter(())
        if hasattr(rows, "close"):
            rows.close()

    def _read(self, first: int) -> Iterator[tuple[int, Any]]:
        files = [file for group in self._groups[first:] for file in group.files]
        last = (first, "")
        with closing(
            cast("Any", self._session.read_tables(list(map(name_for_ray, files)), include_paths=True))
        ) as tables:
            for table in tables:
                for name, rows in cut_by_file(table, keeps_path=self._keeps_path):
                    number = self._number.get(name)
                    if number is None or number < last[0]:
                        raise SourceError(
                            f"Ray must give rows file by file, in the order of their names. Received: rows "
                            f"of {name} after those of {last[1] or 'no file'}. Read these files without "
                            f"--reader, or one at a time"
                        )
                    last = (number, name)
                    yield number, rows


class RayTable:
    """One file, or a group of small ones, that Ray reads."""

    format: ClassVar[str] = "ray"
    missing: ClassVar[Mapping[str, int]] = {}
    notes = ()
    problems = ()

    def __init__(
        self,
        number: int,
        stream: RayStream,
        group: FileGroup,
        *,
        sample: Any,
        rows: int | None,
        expected_rows: int,
        without: Collection[str],
    ) -> None:
        """`sample`: some rows of this group or another one. `rows`: how many there must be; None: any number,
        about `expected_rows`."""
        self._number, self._stream = number, stream
        self.path = cast("Any", group.files[0] if len(group.files) == 1 else group)
        self.sample, self.schema = sample, sample.schema
        self._rows, self.expected_rows = rows, expected_rows if rows is None else rows
        self.counts_rows = rows is not None
        self._without = without

    def batches(self, block_bytes: int, start: int, wanted: Mapping[str, Any]) -> Generator[TableBatch]:
        size = self.path.stat().st_size
        done = 0
        for table in self._stream.tables_of(self._number):
            if done + table.num_rows <= start:
                done += table.num_rows
                continue
            for batch in make_plain_batches(table, self.path, self._without):
                if sorted(batch.schema.names) != sorted(self.schema.names):
                    raise SourceError(
                        f"All rows must have the same columns: {', '.join(self.schema.names)}. Received: "
                        f"{', '.join(batch.schema.names)} in {self.path}. Leave the others out by "
                        f"--without, or "
                        f"import these files alone"
                    )
                count = max(1, batch.num_rows * block_bytes // max(1, batch.nbytes))
                skipped = min(batch.num_rows, max(0, start - done))
                done += skipped
                for first in range(skipped, batch.num_rows, count):
                    piece = batch.slice(first, count)
                    done += piece.num_rows
                    yield TableBatch(piece, min(size, size * done // self.expected_rows), done)
        if done != self._rows if self._rows is not None else not done:
            raise SourceError(
                f"{self.path} must have "
                f"{'rows' if self._rows is None else format_count(self._rows, 'row')} for Ray's "
                f"reader. Received: {done or 'none'}. Leave it out, or fetch it again"
            )


class RayReader:
    """A reader of Ray Data during one import. Use it in a `with` statement, which ends its connection."""

    def __init__(self, request: ReaderRequest, session: RaySession | None = None) -> None:
        self.request = request
        self._session = session or RaySession(request)
        self._streams: list[RayStream] = []

    def __enter__(self) -> RayReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.close()
        self._session.close()

    def open(self, files: Sequence[Member], read_on: str | None, options: SourceOptions) -> list[ArrowSource]:
        """Return the sources that the files make, whose columns are those of the first rows. `read_on` is as
        of `import_cache`. Raises InputError and SourceError."""
        behind_urls = isinstance(files[0], UrlFile)
        to_cluster = read_on == "nodes" or (read_on is None and behind_urls and has_cluster())
        self._session.connect(to_cluster=to_cluster)
        if to_cluster and not behind_urls:
            found = {name_for_ray(file): file.stat() for file in files}
            self._session.check_seen({n: (each.st_size, each.st_mtime_ns) for n, each in found.items()})
        reader, fields = self.request.reader, options.fields
        dropped = {*fields.without, *reader.added}
        sample, bytes_per_row = self._look(files[0], dropped)
        groups = [
            FileGroup(files[first : first + reader.files_per_source])
            for first in range(0, len(files), reader.files_per_source)
        ]
        keeps_path = bool(self.request.options.get("include_paths"))
        stream = RayStream(self._session, groups, keeps_path=keeps_path, without=dropped)
        self._streams.append(stream)
        sources = [
            ArrowSource(
                RayTable(
                    *(number, stream, group),
                    sample=sample,
                    rows=self._count_rows(group),
                    expected_rows=max(1, int(group.stat().st_size / bytes_per_row)),
                    without=dropped,
                )
            )
            for number, group in enumerate(groups)
        ]
        # What is left out isn't in the tables, since some of it can't be read at all.
        arrange_tables(sources, replace(options, fields=replace(fields, without=frozenset())))
        return sources

    def _look(self, file: Member, without: Collection[str]) -> tuple[Any, float]:
        """Return a file's first rows, and about the bytes of each in the file."""
        keeps_path = bool(self.request.options.get("include_paths"))
        tables = self._session.read_tables([name_for_ray(file)], include_paths=keeps_path, rows=_SAMPLE_ROWS)
        with closing(cast("Any", tables)):
            table = next((each for each in tables if each.num_rows), None)
        if table is None:
            raise SourceError(f"{file} has no rows for Ray's reader. Leave it out")
        if PATH in table.column_names and not keeps_path:
            raise SourceError(
                f"{file} has a column {PATH!r} of its own, by which Ray names the file of each row. Give it "
                f"another name, or read the files without --reader"
            )
        missing = set(without) - set(table.column_names) - set(self.request.reader.added)
        if missing:
            raise InputError(
                f"--without names columns that the files have: {', '.join(table.column_names)}. "
                f"Received: {', '.join(sorted(missing))}"
            )
        batch = next(iter(make_plain_batches(table, file, without)))
        if self.request.reader.orders_columns:
            batch = batch.select(sorted(batch.schema.names))
        return batch, max(1.0, batch.nbytes / batch.num_rows)

    def _count_rows(self, group: FileGroup) -> int | None:
        """Return the rows of a group's files where that is known before they are read."""
        if self.request.name == "images":
            return len(group.files)
        if self.request.name == "parquet":
            return sum(map(_count_parquet_rows, group.files))
        return None


def _count_parquet_rows(file: Member) -> int:
    """Return what the footer of a file says."""
    import pyarrow.parquet as pq

    try:
        with malformed_as_error(file), file.open("rb") as opened:
            return int(pq.read_metadata(opened).num_rows)
    except OSError as error:
        raise SourceError(f"{file} can't be read: {error.strerror or error}") from error


def open_ray_sources(
    reader: RayReader, sources: Sequence[str], read_on: str | None, options: SourceOptions
) -> list[ArrowSource]:
    """Find the files that `sources` name, and open them by the reader. Raises InputError and SourceError."""
    name = reader.request.name
    found = find_sources(sources, name, {name: reader.request.reader.suffixes})
    empty = next((file for file, _ in found if file.stat().st_size == 0), None)
    if empty is not None:
        raise SourceError(f"{empty} is empty (0 bytes). Leave it out, or fetch it again")
    # Arrow orders files by their names as texts, whatever order they are given in.
    files = sorted((file for file, _ in found), key=name_for_ray)
    return reader.open(files, read_on, options)


# Pure: what Ray Data's tables hold, as Arrow batches that other sources of an import hold, too.
#
# Ray has types of its own for tensors. One whose rows all have the same shape becomes Arrow's


PATH = "path"
"""The column in which Ray names the file of each row."""
_FIXED = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"
_PICKLED = "ray.data.arrow_pickled_object"


def make_plain_batches(table: Any, path: object, without: Collection[str]) -> Iterator[Any]:
    """Yield the rows of a table of Ray as record batches without Ray's types. `path` is named in errors.

    Columns of `without` are left out. Raises SourceError.
    """
    kept = [name for name in table.column_names if name not in without]
    if not kept:
        raise SourceError(f"{path} has no columns beside those that --without names. Leave out fewer")
    for batch in table.select(kept).combine_chunks().to_batches():
        values = [_make_plain(batch.column(name), name, path) for name in kept]
        yield pa.RecordBatch.from_arrays(values, names=kept)


def _make_plain(values: Any, name: str, path: object) -> Any:
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        _refuse_missing(values, name, path)
        if kind.extension_name in _FIXED:
            return _tensor_of(values.storage.flatten(), tuple(kind.shape))
        if kind.extension_name == _VARIABLE:
            return _tensor_of_equal(values.storage, name, path)
        if kind.extension_name == _PICKLED:
            raise SourceError(
                f"{path}: column {name!r} holds Python objects, which are never unpickled. Leave it out by "
                f"--without {name}, or write its values as numbers or text"
            )
    return values


def _tensor_of(flat: Any, shape: tuple[int, ...]) -> Any:
    """Return tensors of one shape, whose values are end to end in `flat`."""
    if not shape:
        return flat
    kind = pa.fixed_shape_tensor(flat.type, shape)
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, math.prod(shape)))


def _tensor_of_equal(storage: Any, name: str, path: object) -> Any:
    found = list(dict.fromkeys(map(tuple, storage.field("shape").to_pylist())))
    if len(found) > 1:
        first, second = found[:2]
        raise mixed_shapes(path, name, first, second)
    return _tensor_of(storage.field("data").flatten(), tuple(map(int, found[0])))


def _refuse_missing(values: Any, name: str, path: object) -> None:
    if values.null_count:
        raise SourceError(
            f"{path}: column {name!r} misses {format_count(values.null_count, 'value')} in a block of "
            f"{len(values)}. Fill "
            f"them or drop these rows"
        )


def cut_by_file(table: Any, *, keeps_path: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (file, its rows) for the runs of rows of one file, in their order. The column PATH is left out
    unless it `keeps_path`."""
    paths = table.column(PATH)
    rows = table if keeps_path else table.drop_columns([PATH])
    encoded = paths.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    numbers = encoded.indices.to_numpy(zero_copy_only=False)
    if not len(numbers):
        return
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1)]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        yield str(encoded.dictionary[int(numbers[start])]), rows.slice(int(start), int(stop - start))
