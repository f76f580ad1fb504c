"""The sources of an import: files, or a cache of Ignite, opened as the options say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from insitu.errors import InputError
from insitu.grid.appending import options_of_base
from insitu.grid.ignite import is_ignite_address, open_ignite
from insitu.grid.import_plan import ImportOptions
from insitu.grid.ray_data import RayReader, open_ray_sources
from insitu.grid.source_blocks import FileState
from insitu.grid.sources import (
    Source,
    SourceFile,
    SourceOptions,
    UrlFile,
    check_reading,
    find_sources,
    open_sources,
)
from insitu.spec import CacheSpec

_MEANINGS = {
    "column": ("npy", "names the values of .npy files; other files name their columns themselves"),
    "features": ("tfrecord", "says which columns the features of TFRecord files make"),
    "render": ("ndjson", "makes images of the drawings in JSON lines"),
}
"""Options that files of one format take: (the format, what they mean)."""


def open_sources_of(
    sources: Sequence[str], options: ImportOptions, base: CacheSpec | None
) -> tuple[Sequence[Source], tuple[FileState, ...]]:
    """Return the opened sources, and the state of the file of each before. Raises InputError, SourceError."""
    if any(map(is_ignite_address, sources)):
        _read_options([(source, "ignite") for source in sources], options, ("features", "render"))
        reading = SourceOptions(ragged_columns=frozenset(options.ragged))
        source = open_ignite(sources, options.fields, reading)
        return [source], (FileState(source.expected_bytes, 0, 0),)
    if options.reader is not None:
        return _open_by_ray(options.reader, sources, options, base)
    files = find_sources(sources, options.format)
    states = tuple(FileState.of(path) for path, _ in files)
    read_by = _read_options(files, options, tuple(_MEANINGS))
    return open_sources(files, read_by if base is None else options_of_base(base, read_by)), states


def _open_by_ray(
    reader: RayReader, sources: Sequence[str], options: ImportOptions, base: CacheSpec | None
) -> tuple[Sequence[Source], tuple[FileState, ...]]:
    reading = SourceOptions(ragged_columns=frozenset(options.ragged))
    if base is not None:
        reading = options_of_base(base, reading)
    fields = options.fields
    opened = open_ray_sources(reader, sources, options.read_on, reading, fields.tensors, fields.without)
    return opened, tuple(FileState.of(source.path) for source in opened)


def options_for_nodes(
    opened: Sequence[Source], options: ImportOptions, base: CacheSpec | None
) -> SourceOptions:
    """Return how other hosts read one source each, so that all have the columns found in all of them."""
    given = {name: getattr(options, name) for name in _MEANINGS if getattr(options, name) is not None}
    read_by = SourceOptions(ragged_columns=frozenset(options.ragged), **given)
    if base is not None:
        read_by = options_of_base(base, read_by)
    floats = frozenset(column.name for column in opened[0].columns if column.dtype == "float64")
    return replace(read_by, float_columns=read_by.float_columns | floats)


def reads_on_nodes(opened: Sequence[Source], options: ImportOptions, *, in_cluster: bool) -> bool:
    """Return whether nodes read the sources themselves. Raises InputError where they can't."""
    if options.reader is not None:
        return False  # nodes of Ray do, where `read_on` says so
    if options.read_on == "nodes" and not in_cluster:
        raise InputError(
            "--read-on nodes has the nodes of a cluster read the sources. Received: a home without one. "
            "Leave it out, or bring up agents with `insitu up --hosts FILE`"
        )
    wanted = options.read_on == "nodes" or (options.read_on is None and isinstance(opened[0].path, UrlFile))
    return in_cluster and wanted


def _read_options(
    files: Sequence[tuple[str | SourceFile, str]], options: ImportOptions, names: Sequence[str]
) -> SourceOptions:
    """Return what the user adds to what is in the files. Raises InputError where their format doesn't take
    one of the named options."""
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name, value in given.items():
        format, meaning = _MEANINGS[name]
        other = next((f"{path} of format {kind}" for path, kind in files if kind != format), None)
        if other is not None:
            raise InputError(f"--{name} {meaning}. Received: --{name} {value} for {other}. Leave it out")
    check_reading(options.features, options.render)
    return SourceOptions(ragged_columns=frozenset(options.ragged), **given)
