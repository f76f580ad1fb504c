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
from typing import Any, cast

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
    counts_rows,
    describe_columns,
    malformed_as_error,
    raw_bytes,
)
from insitu.grid.sources.column_options import (
    COLUMN_OPTIONS,
    FILL_WORDS,
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
from insitu.grid.sources.file_groups import FileGroup, Member, folder_of, group_files
from insitu.grid.sources.huggingface import LABEL, keep_data_files
from insitu.grid.sources.images import size_needed
from insitu.grid.sources.packing import add_packings
from insitu.grid.sources.parallel import count_threads, map_ordered
from insitu.grid.sources.pictures import SUFFIXES
from insitu.grid.sources.selection import select_columns
from insitu.grid.sources.streams import BatchStream, find_table, open_object
from insitu.grid.sources.table_layout import ENDING_OF_MASK, ColumnProblems, Problem
from insitu.grid.sources.tables import (
    ArrowSource,
    MissingValues,
    TableBatch,
    arrange_tables,
    columns_of_batch,
    logical_type,
    make_tensors,
    mixed_shapes,
    values_of_batch,
    write_json,
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
    "ndjson": ("ndjson", "NdjsonTable", add_packings(".ndjson", ".jsonl")),
    "images": ("images", "ImagesSource", SUFFIXES),
    "webdataset": ("webdataset", "WebdatasetTable", (".tar", ".tar.gz", ".tgz")),
    "text": ("text", "TextSource", add_packings(".txt")),
}
"""Format -> (module, class, suffixes). A test checks it against the classes."""
TABLES = ("parquet", "csv", "arrow", "ndjson", "webdataset")
"""The formats of tables."""
IMAGES, TEXTS = "images", "text"
Suffixes = Mapping[str, tuple[str, ...]]
_SUFFIXES: Suffixes = {kind: suffixes for kind, (*_, suffixes) in FORMATS.items()}
SourceFile = Path | UrlFile | FileGroup
_NUMBER_OF_SHARDS = re.compile(r"-[0-9]{5,}-of-[0-9]{5,}$")
"""Ends the name of a file that is one of several, behind the suffix, as in train.tfrecord-00000-of-00010."""
_CONVERT = (
    "Convert files of other formats, such as tables to Parquet, or see what --reader reads. --format text "
    "reads the texts of a folder that has other files"
)


def list_formats() -> Suffixes:
    """Return the suffixes of files by format. That of a plug-in is a dot and its name."""
    return {**{name: (f".{name}",) for name in list_plugins(SOURCES)}, **_SUFFIXES}


def parse_source_file(text: str) -> SourceFile:
    """Return the file that a path or URL names, or the group that `address_of` has. Raises InputError."""
    if text.startswith("["):
        return FileGroup.parse(text)
    return UrlFile(text) if is_url(text) else Path(text)


def address_of(file: SourceFile | str) -> str:
    """Return the text by which other hosts open an absolute path, a URL or a group of files."""
    if isinstance(file, FileGroup):
        return file.address
    return file.url if isinstance(file, UrlFile) else str(file)


def list_files(files: Sequence[SourceFile]) -> list[Member]:
    """Return the files with those of each group one by one."""
    return [one for file in files for one in (file.files if isinstance(file, FileGroup) else [file])]


def find_sources(
    sources: Sequence[str], format: str | None, known: Suffixes | None = None
) -> list[tuple[Member, str]]:
    """Return (file, format) of all files that `sources` name, each once, ordered by their absolute paths.

    A source is a file, a folder (all its files of a known format, at any depth, but those whose name or
    folder starts with `.` or `_`) or a glob, or a URL of one of these. `format` overrules the suffixes;
    in a folder it chooses by them, but takes files whose name has none before a number of shards.
    Without it a folder's texts are passed over beside other files.
    `known`: format -> the suffixes of its files; None: all, those of plug-ins too. Raises SourceError.
    """
    known = known or list_formats()
    if format is not None and format not in known:
        raise InputError(f"--format must be one of {', '.join(known)}. Received: {format!r}")
    if not sources:
        raise SourceError("Name at least one SOURCE: a file, a folder or a glob")
    found: dict[Member | str, tuple[Member, str]] = {}
    folders: dict[str, str] = {}
    for source in sources:
        expanded = (
            _expand_url(source, format, known)
            if is_url(source)
            else _expand(os.path.expanduser(source), format, known)
        )
        for path, kind in expanded:
            found.setdefault(_identify(path, folders), (path.absolute(), kind))
    if len({type(path) is UrlFile for path in found}) > 1:
        raise SourceError("The sources are paths or URLs. Received: both. Import them one at a time")
    kinds = sorted({kind for _, kind in found.values()})
    if len(kinds) > 1:
        raise SourceError(
            f"The sources are of several formats: {', '.join(kinds)}. Import them one at a time, or name the "
            f"one to take with --format"
        )
    return sorted(found.values(), key=_order)


def _order(pair: tuple[Member, str]) -> tuple[Any, str]:
    file, kind = pair
    return (str(file) if isinstance(file, UrlFile) else file.parts), kind


def _identify(file: Member, folders: dict[str, str]) -> UrlFile | str:
    """Return the URL, or the path without links. `folders` keeps those of folders, for many files in one."""
    if isinstance(file, UrlFile):
        return file
    if os.path.islink(file):
        return os.path.realpath(file)
    folder, name = os.path.split(os.path.abspath(file))
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return f"{folders[folder]}/{name}"


def group_images(files: Sequence[tuple[Member, str]]) -> list[tuple[SourceFile, str]]:
    """Return the same files, images in groups."""
    images = group_files([file for file, kind in files if kind == IMAGES])
    others = [(file, kind) for file, kind in files if kind != IMAGES]
    return [*others, *((group, IMAGES) for group in images)]


def _choose_in_folder(
    files: Sequence[Member], format: str | None, suffixes: Suffixes
) -> list[tuple[Member, str]]:
    """Return (file, format) of the files of a folder that are meant. Raises SourceError."""
    chosen = keep_data_files(files)
    known = [(file, kind) for file in chosen if (kind := _format_in_folder(file, format, suffixes))]
    others = [pair for pair in known if pair[1] != TEXTS]
    # Beside other files texts are such as README.txt.
    return others or (known if format or len(known) == len(chosen) else [])


def _expand_url(source: str, format: str | None, suffixes: Suffixes) -> list[tuple[Member, str]]:
    files, is_folder = expand_url(source)
    if not is_folder:
        return [(file, _known_format(file, format, suffixes)) for file in files]
    below = [f for f in files if not any(map(_is_hidden, str(f).removeprefix(source).split("/")))]
    known = _choose_in_folder(below, format, suffixes)
    if not known:
        raise SourceError(
            f"Folder {source} holds no file that ends in {_join(suffixes, format)}. Received: "
            f"{format_count(len(below), 'file')}. "
            f"{_CONVERT}"
        )
    return known


def _known_format(file: Member, format: str | None, suffixes: Suffixes) -> str:
    """Return the format of a file. Raises SourceError if its name doesn't say it."""
    kind = format or _format_of(file, suffixes)
    if kind is None:
        raise SourceError(
            f"The format of {file} is unknown: its name ends in none of {_join(suffixes, None)}. If it has "
            f"one of these formats, name it with --format {'|'.join(suffixes)}. {_CONVERT}"
        )
    return kind


def _expand(source: str, format: str | None, suffixes: Suffixes) -> list[tuple[Member, str]]:
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
        below = _files_below(path)
        known = _choose_in_folder(below, format, suffixes)
        if not known:
            raise SourceError(
                f"Folder {source} holds no file that ends in {_join(suffixes, format)}. Received: "
                f"{_describe_files(below)}. {_CONVERT}"
            )
        return known
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
    return sorted((path for path in found if os.path.isfile(path)), key=lambda path: path.parts)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _format_of(path: SourceFile, known: Suffixes) -> str | None:
    name = _NUMBER_OF_SHARDS.sub("", path.name.lower())
    return next((kind for kind, suffixes in known.items() if name.endswith(suffixes)), None)


def _format_in_folder(path: Member, format: str | None, known: Suffixes) -> str | None:
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


def folder_name(path: SourceFile) -> str:
    """Return the name of the folder of a file, or of those of a group. Raises SourceError for the root."""
    name = folder_of(path.files[0] if isinstance(path, FileGroup) else path).rpartition("/")[2]
    if not name:
        raise SourceError(f"--label-from-folder takes the name of the folder of each file. Received: {path}")
    return name


def open_sources(files: Sequence[tuple[SourceFile, str]], options: SourceOptions) -> list[Source]:
    """Open every file's header and check that all have the same columns. Raises SourceError, SizeNeeded."""
    opened = open_all(files, options)
    tables = [source for source in opened if isinstance(source, ArrowSource)]
    if len(tables) == len(opened):
        arrange_tables(tables, options)
    elif options.ragged_columns:
        raise InputError(
            f"--ragged names columns of lists in Parquet or Arrow files, or JSON lines. Received: --ragged "
            f"{min(options.ragged_columns)} for {opened[0].path} with {describe_columns(opened[0].columns)}"
        )
    else:
        opened = [select_columns(source, options.fields) for source in opened]
    for source in opened:
        if source.columns != opened[0].columns:
            raise SourceError(
                f"The sources differ: {opened[0].path} has {describe_columns(opened[0].columns)}, but "
                f"{source.path} has {describe_columns(source.columns)}. All must have the same columns, "
                f"dtypes and shapes, in the same order"
            )
        if labels_of(source) != labels_of(opened[0]):
            raise SourceError(
                f"The classes of column {LABEL!r} must be the same in all files. Received: "
                f"{', '.join(labels_of(opened[0])) or 'none'} of {opened[0].path}, but "
                f"{', '.join(labels_of(source)) or 'none'} of {source.path}. Import them one at a time"
            )
    return opened


def open_all(files: Sequence[tuple[SourceFile, str]], options: SourceOptions) -> list[Source]:
    """Open every file's header. Tables have no columns yet (`arrange_tables`). Raises SourceError,
    SizeNeeded."""
    groups = [file for file, _ in files if isinstance(file, FileGroup)]
    if groups and options.images is None:
        raise size_needed(groups)
    with closing(map_ordered(lambda file: _open(*file, options), iter(files))) as opened:
        return list(opened)


def skipped_of(source: Source) -> list[str]:
    """Return what is wrong with each image that a source has passed over so far."""
    return list(getattr(source, "skipped", ()))


def labels_of(source: Source) -> tuple[str, ...]:
    """Return the names of the classes of a source's own column `label`; empty if it names none."""
    return tuple(getattr(source, "labels", ()))


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
