"""The files that `import` reads: finds them, chooses their format, checks that they agree.

Begin reading with `base.py`, what each format's module gives, and `connectors.py`, how tables of other
systems are read.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import cast

from insitu.base.errors import InputError, SourceError
from insitu.base.plugins import SOURCES, list_plugins, load_plugin
from insitu.base.wording import format_count
from insitu.grid.partitions import is_ragged
from insitu.grid.sources.base import (
    DTYPES,
    MOST_ROW_VALUES,
    Block,
    CsvOptions,
    Source,
    SourceOptions,
    TableColumn,
    describe_columns,
    malformed_as_error,
    raw_bytes,
)
from insitu.grid.sources.column_options import (
    COLUMN_OPTIONS,
    ColumnOptions,
    parse_column_options,
    read_columns,
)
from insitu.grid.sources.connectors import (
    Connector,
    Description,
    Part,
    PartitionedTable,
    ReadAccount,
    RowWriter,
    TableSource,
    address_by_configuration,
    describe_moves,
    find_connector,
    find_table_connector,
    load_connector,
)
from insitu.grid.sources.parallel import count_threads, map_ordered
from insitu.grid.sources.selection import select_columns
from insitu.grid.sources.streams import BatchStream, find_table, open_object
from insitu.grid.sources.table_layout import ColumnProblems, Problem
from insitu.grid.sources.tables import (
    ArrowSource,
    MissingValues,
    TableBatch,
    arrange_tables,
    columns_of_batch,
    logical_type,
    mixed_shapes,
    values_of_batch,
)
from insitu.grid.sources.tfrecord import check_reading
from insitu.grid.sources.urls import UrlFile, expand_url, is_url

FORMATS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "npy": ("npy", "NpySource", (".npy",)),
    "npz": ("npz", "NpzSource", (".npz",)),
    "parquet": ("parquet", "ParquetTable", (".parquet", ".pq")),
    "csv": ("csv", "CsvTable", (".csv", ".csv.gz", ".csv.zst", ".csv.bz2", ".tsv", ".tsv.gz")),
    "arrow": ("ipc", "IpcTable", (".arrow", ".feather", ".ipc", ".arrows")),
    "tfrecord": ("tfrecord", "TfrecordSource", (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")),
    "ndjson": ("ndjson", "NdjsonTable", (".ndjson", ".jsonl", ".ndjson.gz", ".jsonl.gz")),
}
"""Format -> (module, class, suffixes). A test checks it against the classes."""
TABLES = ("parquet", "csv", "arrow", "ndjson")
"""The formats of tables."""
Suffixes = Mapping[str, tuple[str, ...]]
_SUFFIXES: Suffixes = {kind: suffixes for kind, (*_, suffixes) in FORMATS.items()}
SourceFile = Path | UrlFile
_NUMBER_OF_SHARDS = re.compile(r"-[0-9]{5,}-of-[0-9]{5,}$")
"""Ends the name of a file that is one of several, behind the suffix, as in train.tfrecord-00000-of-00010."""
_CONVERT = (
    "Images and other formats aren't supported here: read images and WebDataset by Ray Data, such as "
    "--reader images, or convert them, such as tables to Parquet"
)


def list_formats() -> Suffixes:
    """Return the suffixes of files by format. That of a plug-in is a dot and its name."""
    return {**{name: (f".{name}",) for name in list_plugins(SOURCES)}, **_SUFFIXES}


def parse_source_file(text: str) -> SourceFile:
    """Return the file that a path or URL names."""
    return UrlFile(text) if is_url(text) else Path(text)


def find_sources(
    sources: Sequence[str], format: str | None, known: Suffixes | None = None
) -> list[tuple[SourceFile, str]]:
    """Return (file, format) of all files that `sources` name, each once, ordered by their absolute paths.

    A source is a file, a folder (all its files of a known format, at any depth, but those whose name or
    folder starts with `.` or `_`) or a glob, or a URL of one of these. `format` overrules the suffixes;
    in a folder it chooses by them, but takes files whose name has none before a number of shards.
    `known`: format -> the suffixes of its files; None: all, those of plug-ins too. Raises SourceError.
    """
    known = known or list_formats()
    if format is not None and format not in known:
        raise InputError(f"--format must be one of {', '.join(known)}. Received: {format!r}")
    if not sources:
        raise SourceError("Name at least one SOURCE: a file, a folder or a glob")
    found: dict[SourceFile, tuple[SourceFile, str]] = {}
    for source in sources:
        expanded = (
            _expand_url(source, format, known)
            if is_url(source)
            else _expand(os.path.expanduser(source), format, known)
        )
        for path, kind in expanded:
            found.setdefault(path.resolve(), (path.absolute(), kind))
    if len({type(path) is UrlFile for path in found}) > 1:
        raise SourceError("The sources are paths or URLs. Received: both. Import them one at a time")
    kinds = sorted({kind for _, kind in found.values()})
    if len(kinds) > 1:
        raise SourceError(
            f"The sources are of several formats: {', '.join(kinds)}. Import them one at a time, or name the "
            f"one to take with --format"
        )
    return sorted(found.values(), key=lambda pair: (str(pair[0]), pair[1]) if _is_url(pair) else pair)


def _is_url(pair: tuple[SourceFile, str]) -> bool:
    return isinstance(pair[0], UrlFile)


def _expand_url(source: str, format: str | None, suffixes: Suffixes) -> list[tuple[SourceFile, str]]:
    files, is_folder = expand_url(source)
    if not is_folder:
        return [(file, _known_format(file, format, suffixes)) for file in files]
    below = [f for f in files if not any(map(_is_hidden, str(f).removeprefix(source).split("/")))]
    known = [(f, kind) for f in below if (kind := _format_in_folder(f, format, suffixes))]
    if not known:
        raise SourceError(
            f"Folder {source} holds no file that ends in {_join(suffixes, format)}. Received: "
            f"{format_count(len(below), 'file')}. "
            f"{_CONVERT}"
        )
    return list(known)


def _known_format(file: SourceFile, format: str | None, suffixes: Suffixes) -> str:
    """Return the format of a file. Raises SourceError if its name doesn't say it."""
    kind = format or _format_of(file, suffixes)
    if kind is None:
        raise SourceError(
            f"The format of {file} is unknown: its name ends in none of {_join(suffixes, None)}. If it has "
            f"one of these formats, name it with --format {'|'.join(suffixes)}. {_CONVERT}"
        )
    return kind


def _expand(source: str, format: str | None, suffixes: Suffixes) -> list[tuple[SourceFile, str]]:
    _refuse_nothing(source)
    path = Path(source)
    mode = _mode(path)
    if mode is None:
        if not glob.has_magic(source):
            raise SourceError(f"{source} doesn't exist")
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise SourceError(f"No file matches {source}")
        return [pair for match in matches for pair in _expand(match, format, suffixes)]
    if stat.S_ISDIR(mode):
        found = [(p, _format_in_folder(p, format, suffixes)) for p in _files_below(path)]
        known = [(p, kind) for p, kind in found if kind]
        if not known:
            raise SourceError(
                f"Folder {source} holds no file that ends in {_join(suffixes, format)}. Received: "
                f"{_describe_files(_files_below(path))}. {_CONVERT}"
            )
        return list(known)
    if not stat.S_ISREG(mode):
        raise SourceError(
            f"{source} must be a file or a folder. Received: {_kind_of_file(mode)}. Write what comes from it "
            f"to a file first"
        )
    return [(path, _known_format(path, format, suffixes))]


def _refuse_nothing(source: str) -> None:
    """Raise SourceError for what names nothing at all."""
    if not source.strip():
        raise SourceError(
            f"A SOURCE is a file, a folder or a glob; `.` is the current folder. Received: {source!r}"
        )


def _kind_of_file(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def _describe_files(files: Sequence[Path]) -> str:
    """Return such as `12 .png, 1 .txt`, the most frequent first."""
    counts = Counter(path.suffix.lower() or "without a suffix" for path in files)
    named = [f"{count} {suffix}" for suffix, count in counts.most_common(5)]
    return ", ".join(named) + (", ..." if len(counts) > 5 else "") if files else "no files"


def _mode(path: Path) -> int | None:
    """Return the kind of the file `path`, as in `stat`; None if there is none. Raises SourceError."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}") from error


def _files_below(folder: Path) -> list[Path]:
    """Return all files at any depth but hidden ones. Raises SourceError if a folder can't be listed."""

    def refuse(error: OSError) -> None:
        raise SourceError(f"Folder {error.filename} can't be read: {error.strerror}") from error

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        found += [Path(parent) / name for name in names if not _is_hidden(name)]
    return sorted(path for path in found if path.is_file())


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _format_of(path: SourceFile, known: Suffixes) -> str | None:
    name = _NUMBER_OF_SHARDS.sub("", path.name.lower())
    return next((kind for kind, suffixes in known.items() if name.endswith(suffixes)), None)


def _format_in_folder(path: SourceFile, format: str | None, known: Suffixes) -> str | None:
    """Return the format of a file of a folder; None for one that isn't meant. `format` counts for names that
    say nothing but a number of shards, as train-00000-of-00010."""
    kind = _format_of(path, known)
    if kind is None and _NUMBER_OF_SHARDS.search(path.name.lower()):
        return format
    return kind if format in (None, kind) else None


def _join(known: Suffixes, format: str | None) -> str:
    return ", ".join(s for kind, suffixes in known.items() if format in (None, kind) for s in suffixes)


def stem(path: SourceFile) -> str:
    """Return a file's name without the suffix of its format."""
    known = list_formats()
    kind = _format_of(path, known)
    suffixes = known[kind] if kind else (path.suffix,)
    ends = [s for s in suffixes if path.name.lower().endswith(s)]
    return path.name[: len(path.name) - max(map(len, ends), default=0)]


def open_sources(files: Sequence[tuple[SourceFile, str]], options: SourceOptions) -> list[Source]:
    """Open every file's header and check that all have the same columns. Raises SourceError."""
    opened = open_all(files, options)
    tables = [source for source in opened if isinstance(source, ArrowSource)]
    if len(tables) == len(opened):
        arrange_tables(tables, options)
        return opened
    if options.ragged_columns:
        raise InputError(
            f"--ragged names columns of lists in Parquet or Arrow files, or JSON lines. Received: --ragged "
            f"{min(options.ragged_columns)} for {opened[0].path} with {describe_columns(opened[0].columns)}"
        )
    opened = [select_columns(source, options.fields) for source in opened]
    for source in opened:
        if source.columns != opened[0].columns:
            raise SourceError(
                f"The sources differ: {opened[0].path} has {describe_columns(opened[0].columns)}, but "
                f"{source.path} has {describe_columns(source.columns)}. All must have the same columns, "
                f"dtypes and shapes, in the same order"
            )
    return opened


def open_all(files: Sequence[tuple[SourceFile, str]], options: SourceOptions) -> list[Source]:
    """Open every file's header. Tables have no columns yet (`arrange_tables`). Raises SourceError."""
    with closing(map_ordered(lambda file: _open(*file, options), iter(files))) as opened:
        return list(opened)


def _open(file: SourceFile, kind: str, options: SourceOptions) -> Source:
    path = cast("Path", file)
    if kind in FORMATS:
        module, name, _ = FORMATS[kind]
        make = getattr(import_module(f"insitu.grid.sources.{module}"), name)
    else:
        make = load_plugin(SOURCES, kind)
    try:
        if path.stat().st_size == 0:
            raise SourceError(f"{path} is empty (0 bytes). Leave it out, or fetch it again")
        with malformed_as_error(path):
            made = make(path, options)
            return ArrowSource(made) if kind in TABLES else cast("Source", made)
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error
