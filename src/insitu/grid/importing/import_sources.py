"""The sources of an import: files, tables of other systems or objects of Python, opened as the options say.

Here an error gets the command that helps: `command_advised` for images, `remedies_shown` for tables.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from insitu.base.errors import DamagedImages, InputError, SizeNeeded, SourceError
from insitu.base.spec import CacheSpec
from insitu.base.wording import hide_password
from insitu.grid.importing.appending import options_of_base
from insitu.grid.intake import CSV_OPTIONS, FileState
from insitu.grid.ray_data import RayReader, open_ray_sources
from insitu.grid.sources import (
    ArrowSource,
    BatchStream,
    ColumnProblems,
    CsvOptions,
    FileGroup,
    MissingValues,
    Problem,
    Source,
    SourceFile,
    SourceOptions,
    UrlFile,
    arrange_tables,
    check_reading,
    find_connector,
    find_sources,
    find_table,
    folder_of,
    group_images,
    is_url,
    list_files,
    open_sources,
    read_columns,
)
from insitu.options import ImportOptions, format_options, list_given, parse_images

_MEANINGS = {
    "column": (("npy",), "names the values of .npy files; other files name their columns themselves"),
    "features": (("tfrecord",), "says which columns the features of TFRecord files make"),
    "render": (("ndjson",), "makes images of the drawings in JSON lines"),
    "images": (
        ("images", "webdataset", "parquet", "arrow"),
        "decodes files of images, WebDataset, and columns of images in Parquet and Arrow files",
    ),
    "skip_damaged": (("images", "webdataset"), "leaves out files of images, and samples of WebDataset"),
    **dict.fromkeys(CSV_OPTIONS, (("csv",), "says how the text of CSV files is divided into fields")),
}
"""Options that files of some formats take: (the formats, what they mean)."""


def open_sources_of(
    options: ImportOptions, data: BatchStream | None, reader: RayReader | None, base: CacheSpec | None
) -> tuple[Sequence[Source], tuple[FileState, ...]]:
    """Return the opened sources, and the state of the file of each before. Raises InputError, SourceError.

    `data`: rows of an object of Python; None: the sources are those that `options` name. `reader`: of Ray
    Data; None: insitu reads them. `base`: the version that rows are appended to.
    """
    given, columns = options.sources, read_columns(options)
    reading = choose_reading(options, base)
    connector = next(filter(None, map(find_connector, given)), None)
    if connector is not None:
        refuse_for_format(options, [(source, connector.scheme) for source in given])
        if len(given) != 1:
            raise InputError(
                f"A table of another system is imported alone. Received: {len(given)} sources. Several "
                f"servers are named in one address: {connector.scheme}://HOST,HOST/..."
            )
        table = connector.open(given[0], columns, reading)
        return [table], (FileState(table.expected_bytes, 0, 0),)
    stream = data or _find_table(options)
    if stream is not None:
        refuse_for_format(options, [(stream.path, stream.format)])
        source = ArrowSource(stream)
        arrange_tables([source], reading)
        return [source], (FileState(stream.expected_bytes, 0, 0),)
    if reader is not None:
        opened = open_ray_sources(reader, given, options.read_on, reading)
        return opened, tuple(FileState.of(source.path) for source in opened)
    files = group_images(find_sources(given, options.format))
    refuse_for_format(options, files)
    states = tuple(FileState.of(path) for path, _ in files)
    with command_advised(options, files):
        return open_sources(files, reading), states


def _find_table(options: ImportOptions) -> BatchStream | None:
    """Return the table of Delta, Iceberg or a database that is imported; None: the sources are others."""
    found = [find_table(source, options.sql, options.table_version) for source in options.sources]
    if any(found) and len(found) > 1:
        raise InputError(
            f"A table is imported alone. Received: {len(found)} sources. Import the others with --append"
        )
    return next(filter(None, found), None)


def choose_reading(options: ImportOptions, base: CacheSpec | None) -> SourceOptions:
    """Return what the user adds to what is in the sources, and what the version says that is appended to."""
    named = _MEANINGS.keys() - set(CSV_OPTIONS)
    given = {each.name: value for each, value in list_given(options) if each.name in named}
    reading = SourceOptions(
        ragged_columns=frozenset(options.ragged),
        fields=read_columns(options),
        csv=CsvOptions(**{each.name: getattr(options, each.name) for each in fields(CsvOptions)}),
        **given,
    )
    return reading if base is None else options_of_base(base, reading)


def refuse_for_format(options: ImportOptions, files: Sequence[tuple[str | SourceFile, str]]) -> None:
    """Raise InputError if the format of the files doesn't take one of the options that are given."""
    for each, value in list_given(options):
        formats, meaning = _MEANINGS.get(each.name, ((), ""))
        other = next((f"{path} of format {kind}" for path, kind in files if kind not in formats), None)
        if formats and other is not None:
            given = " ".join(each.format(value))
            raise InputError(f"{each.flag} {meaning}. Received: {given} for {other}. Leave it out")
    check_reading(options.features, options.render)


def options_for_nodes(
    opened: Sequence[Source], options: ImportOptions, base: CacheSpec | None
) -> SourceOptions:
    """Return how other hosts read one source each, so that all have the columns found in all of them."""
    return replace(choose_reading(options, base), layout=getattr(opened[0], "layout", ()))


def find_source_files(options: ImportOptions) -> list[str]:
    """Return the files of this machine that an import reads, in its order; none if the sources are elsewhere.

    They are opened, to see that they can be read. Raises InputError, SourceError.
    """
    if all(find_connector(source) is not None or is_url(source) for source in options.sources):
        return []
    if _find_table(options) is not None:
        raise InputError(
            f"Tables of Delta, Iceberg and databases are read on a host of the cluster. Received: "
            f"{options.sources[0]} beside --cluster. Give the command there"
        )
    files = group_images(find_sources(options.sources, options.format))
    refuse_for_format(options, files)
    if not options.append:  # what the cache says of its columns isn't known here
        with command_advised(options, files):
            open_sources(files, choose_reading(options, None))
    return [str(file) for file in list_files([file for file, _ in files])]


@contextlib.contextmanager
def command_advised(options: ImportOptions, files: Sequence[tuple[SourceFile | str, str]]) -> Iterator[None]:
    """Add the command to an error about images, with which they are imported."""
    try:
        yield
    except SizeNeeded as error:
        changed = replace(options, images=parse_images(error.shape))
        groups = {folder_of(file.files[0]) for file, _ in files if isinstance(file, FileGroup)}
        roots = {os.path.abspath(os.path.expanduser(source)) for source in options.sources}
        in_folders = len(groups) > 1 or any(not is_url(folder) for folder in groups - roots)
        if in_folders and not (options.label_from_filename or options.append):
            changed = replace(changed, label_from_folder=True)
        raise SourceError(
            f"{error.message}. Give that or a smaller one: `{write_command(changed)}`"
        ) from error
    except DamagedImages as error:
        error.message += ". Fetch them again"
        if not options.skip_damaged and files[0][1] in _MEANINGS["skip_damaged"][0]:
            command = write_command(replace(options, skip_damaged=True))
            error.message += f", or leave them out: `{command}`"
        raise


def write_command(options: ImportOptions, *more: str) -> str:
    """Return the command of a shell that imports with these options, and `more`. URLs lose their secrets."""
    sources = [str(UrlFile(source)) if is_url(source) else source for source in options.sources]
    # What is added takes the place of what was said of the same column.
    named = {value.rpartition("=")[0] for flag, value in itertools.pairwise(more) if flag == "--dtype"}
    kept = tuple(each for each in options.dtype if each.rpartition("=")[0] not in named)
    options = replace(options, dtype=kept)
    # A value that begins as an option does isn't one.
    added: list[str] = []
    for part in more:
        if added and re.match("-[^-]", part):
            added[-1] += f"={part}"
        else:
            added.append(part)
    names, given = [options.cache, *map(hide_password, sources)], [*format_options(options), *added]
    if any(name.startswith("-") for name in names):
        return shlex.join(["insitu", "import", *given, "--", *names])
    return shlex.join(["insitu", "import", *names, *given])


def reads_on_nodes(opened: Sequence[Source], options: ImportOptions, *, in_cluster: bool) -> bool:
    """Return whether nodes read the sources themselves. Raises InputError if they can't."""
    if options.reader is not None:
        return False  # nodes of Ray do, if `read_on` says so
    if options.read_on == "nodes" and not in_cluster:
        raise InputError(
            "--read-on nodes has the nodes of a cluster read the sources. Received: a home without one. "
            "Leave it out, or bring up agents with `insitu up --hosts FILE`"
        )
    if options.limit is not None:
        if options.read_on == "nodes":
            raise InputError(
                "--limit counts rows in the order of the sources, which nodes read side by side. Received: "
                "it beside --read-on nodes. Leave one of them out; --sample keeps a part of the rows"
            )
        return False
    if isinstance(opened[0].path, str) and options.read_on == "nodes":
        raise InputError(
            f"--read-on nodes is for files that nodes see. Received: it for {opened[0].path}. Leave it out"
        )
    path: object = opened[0].path
    is_elsewhere = path.is_url if isinstance(path, FileGroup) else isinstance(path, UrlFile)
    wanted = options.read_on == "nodes" or (options.read_on is None and is_elsewhere)
    return in_cluster and wanted


@contextlib.contextmanager
def remedies_shown(options: ImportOptions, *, in_python: bool) -> Iterator[None]:
    """Name the whole command that takes columns which can't be taken as they are."""
    try:
        yield
    except ColumnProblems as error:
        if in_python:
            given: dict[str, list[str]] = {}
            for each in error.problems:
                given.setdefault(each.remedy[0].removeprefix("--").replace("-", "_"), []).extend(
                    each.remedy[1:]
                )
            shown = ", ".join(f"{name}={value}" for name, value in given.items())
            raise SourceError(f"{error}, which in Python is {shown}") from error
        raise SourceError(f"{error}, as in: {write_command(options, *error.remedy)}") from error


@contextlib.contextmanager
def all_missing_values_named(sources: Sequence[Source]) -> Iterator[None]:
    """Name all columns of all sources that miss values where one does, for which all rows are read."""
    try:
        yield
    except MissingValues as error:
        found: dict[str, Problem] = {}
        for source in sources:
            if isinstance(source, ArrowSource):
                for each in source.describe_missing_values():
                    found.setdefault(each.column, each)
        raise ColumnProblems(error.place, list(found.values()) or error.problems) from error
