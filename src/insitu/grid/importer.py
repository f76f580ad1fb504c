"""`insitu import`: rows from sources into the partitions of a new version of a cache.

    A  find the sources and read their headers; all must have the same columns
    B  read them block by block; hash each row to its split and partition; whenever a partition has a block
       of rows, write it into the staged store of the partition's primary owner
    C  complete the partitions; copy them to their backups
    D  rename the staged stores into the stores of their nodes
    E  publish all versions in one transaction of the catalogue; only now does anybody see them

An import that dies before E leaves the old version as it was, and files that no reader sees. The next import,
`insitu caches` or `insitu nodes` removes them. Files belong to a living import if it holds the kernel's lock
on the cache, which ends with its process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from insitu.access import apply_modes, make_folder
from insitu.durable import NO_ROOM, sync_folder
from insitu.errors import CacheBusy, CacheExists, GridError, InputError, SourceError
from insitu.grid.catalog import Catalog
from insitu.grid.files import cache_locks, full_disk_as_error, home_errors
from insitu.grid.layout import (
    check_split,
    hash_integers,
    hash_rows,
    hash_texts,
    owners_of_partition,
    partition_of_rows,
    split_of_rows,
)
from insitu.grid.partition_builder import BUFFER_BYTES, PartitionBuilders
from insitu.grid.partitions import TEXT, rows_per_block, text_buffers
from insitu.grid.sources import (
    Block,
    Source,
    SourceOptions,
    describe_columns,
    find_sources,
    malformed_as_error,
    open_sources,
    stem,
)
from insitu.grid.topology import load_topology
from insitu.grid.verification import record_written
from insitu.paths import Paths, StagedPaths, cache_name_of_folder
from insitu.processes import read_host
from insitu.spec import CacheSpec, Column, PartitionInfo, Topology, check_cache_name

LABEL = "label"
LEAST_PARTITIONS = 8
"""The default number of partitions, rounded up to the same number on each node."""
MAX_PARTITIONS = 1 << 16
BLOCK_BYTES = 8 << 20

ProgressCallback = Callable[[int, int, int | None], None]
"""Called with (rows done, bytes of the sources done, bytes of the sources in all)."""


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What one import reads and makes."""

    #: The caches that are made: one, or one for each part of a split.
    names: tuple[str, ...]
    #: `names[i]` takes about `fractions[i]` of the rows.
    fractions: tuple[float, ...]
    #: The source files, in the order of their rows.
    sources: tuple[Source, ...]
    #: The columns that all caches get.
    columns: tuple[Column, ...]
    #: The classes of column `label`, if file names make it; else empty.
    labels: tuple[str, ...]
    #: Of each cache.
    partitions: int
    #: Further copies of each partition.
    backups: int
    #: The column whose hash chooses a row's partition; None: the row's index in all sources.
    key: str | None
    #: The nodes that partitions are spread over.
    topology: Topology
    #: Bytes of all source files, for the progress.
    source_bytes: int
    #: Rows of each block of a partition but its last.
    block_rows: int


def import_cache(
    paths: Paths,
    name: str,
    sources: Sequence[str],
    *,
    partitions: int | None = None,
    backups: int = 0,
    format: str | None = None,
    column: str | None = None,
    key: str | None = None,
    label_from_filename: bool = False,
    overwrite: bool = False,
    split: Mapping[str, float] | None = None,
    progress: ProgressCallback | None = None,
) -> list[CacheSpec]:
    """Import `sources` as a new version of cache `name`; return what was published.

    `partitions` defaults to 8 or more, the same number on each node. `column` names the values of `.npy`
    files, "x" unless given. `key` is the column whose hash chooses a row's partition; None: its index in
    all sources, in the order of their paths. `label_from_filename` adds an int64 column `label`, the index of
    the file's name (without suffix) among all of them, sorted. `split` such as {"train": 0.9, "test": 0.1}
    makes NAME/train and NAME/test instead, by a hash of the same, published together.

    Raises InputError or SourceError for bad input, CacheExists, CacheBusy while another process imports
    into the cache, StorageFull; after any of them all is as it was before.
    """
    names, fractions = _names_and_fractions(name, split)
    with home_errors(paths.home):
        catalog = Catalog(paths)
        _refuse_existing(catalog, names, overwrite)
        files = find_sources(sources, format)
        opened = open_sources(files, _source_options(files, column))
        topology = load_topology(paths)
        columns = _columns(opened[0], label_from_filename)
        partitions = _check_partitions(partitions, topology)
        plan = ImportPlan(
            names=names,
            fractions=fractions,
            sources=tuple(opened),
            columns=columns,
            labels=tuple(sorted({stem(path) for path, _ in files})) if label_from_filename else (),
            partitions=partitions,
            backups=backups,
            key=key,
            topology=topology,
            source_bytes=sum(path.stat().st_size for path, _ in files),
            block_rows=_choose_block_rows(opened, columns, len(names) * partitions),
        )
        _check_key(plan)
        owners_of_partition(0, topology, backups)
        with cache_locks(paths, names):
            _refuse_existing(catalog, names, overwrite)
            sweep(paths, names)
            return _import(paths, catalog, plan, overwrite, progress or (lambda rows, done, total: None))


def _source_options(files: Sequence[tuple[Path, str]], column: str | None) -> SourceOptions:
    if column is None:
        return SourceOptions()
    other = next((f"{path} of format {kind}" for path, kind in files if kind != "npy"), None)
    if other is not None:
        raise InputError(
            f"--column names the values of .npy files; other files name their columns themselves. Received: "
            f"--column {column} for {other}. Leave it out"
        )
    return SourceOptions(column=column)


def _names_and_fractions(
    name: str, split: Mapping[str, float] | None
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    check_cache_name(name)
    if split is None:
        return (name,), (1.0,)
    check_split(split)
    return tuple(check_cache_name(f"{name}/{part}") for part in split), tuple(split.values())


def sweep(paths: Paths, locked: Sequence[str] = ()) -> int:
    """Remove what dead imports left: staging, and version folders that the catalogue doesn't know.

    Leaves alone what belongs to an import that is alive. `locked` are caches that the caller has locked;
    others are locked for the instant that it takes to rename what is dead. Returns the bytes removed.
    """
    caches = {cache_name_of_folder(store.name) for node in _folders(paths.nodes) for store in _folders(node)}
    caches |= {cache_name_of_folder(folder.name) for folder in _folders(paths.staging)}
    for cache in sorted(caches - {""}):
        if not _dead_folders(paths, cache):
            continue
        with contextlib.suppress(CacheBusy, InputError), contextlib.ExitStack() as stack:
            if cache not in locked:
                stack.enter_context(cache_locks(paths, [cache]))
            make_folder(paths.home, paths.staging)
            for folder in _dead_folders(paths, cache):
                folder.rename(paths.trash(secrets.token_hex(8)))
    removed = 0
    for folder in _folders(paths.staging):
        if not cache_name_of_folder(folder.name):
            removed += sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _dead_folders(paths: Paths, cache: str) -> list[Path]:
    """Return the folders that dead imports into `cache` left, provided that nobody imports into it now."""
    known = {f"v{spec.version}" for spec in Catalog(paths).stored() if spec.name == cache}
    staged = [
        f
        for f in _folders(paths.staging)
        if cache_name_of_folder(f.name) == cache and not _is_of_another_host(f)
    ]
    stores = [
        s for node in _folders(paths.nodes) for s in _folders(node) if cache_name_of_folder(s.name) == cache
    ]
    return [*staged, *(v for store in stores for v in _folders(store) if v.name not in known)]


def _host_mark() -> str:
    """Return the beginning of the names of folders in staging that imports of this host make."""
    return f"{zlib.crc32(read_host().encode()):08x}"


def _is_of_another_host(staged: Path) -> bool:
    """Return whether an import of another host made the folder: its lock may not be seen here."""
    mark, dash, _ = staged.name.partition("~")[2].partition("-")
    return bool(dash) and len(mark) == 8 and mark != _host_mark()


def _folders(parent: Path) -> list[Path]:
    return [p for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []


def _refuse_existing(catalog: Catalog, names: Sequence[str], overwrite: bool) -> None:
    existing = [] if overwrite else [name for name in names if catalog.find(name)]
    if existing:
        raise CacheExists(
            f"Cache {' and '.join(existing)} exists. Give --overwrite to put a new version in its place"
        )


def _columns(source: Source, label_from_filename: bool) -> tuple[Column, ...]:
    if not label_from_filename:
        return source.columns
    if any(column.name == LABEL for column in source.columns):
        raise SourceError(
            f"{source.path} has a column {LABEL!r} of its own, so --label-from-filename can't add one"
        )
    return (*source.columns, Column(LABEL, "int64"))


def _check_partitions(partitions: int | None, topology: Topology) -> int:
    if partitions is None:
        nodes = len(topology.nodes)
        return -(-LEAST_PARTITIONS // nodes) * nodes
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InputError(f"--partitions must be in [1, {MAX_PARTITIONS}]. Received: {partitions}")
    return partitions


def _choose_block_rows(opened: Sequence[Source], columns: tuple[Column, ...], destinations: int) -> int:
    """Return the rows of a block. How long texts are is judged by the first rows of the first source."""
    text_bytes = 0.0
    texts = [column.name for column in columns if column.dtype == TEXT]
    if texts and (block := next(iter(_blocks(opened[0])), None)) is not None:
        for name in texts:
            offsets, _ = text_buffers(block.columns[name])
            text_bytes += float(offsets[-1] - offsets[0]) / max(1, block.rows)
    return rows_per_block(columns, text_bytes, limit=BUFFER_BYTES // destinations)


def _check_key(plan: ImportPlan) -> None:
    if plan.key is None:
        return
    column = next((c for c in plan.columns if c.name == plan.key), None)
    if column is None:
        raise InputError(
            f"--key {plan.key} is no column of the sources, which have {describe_columns(plan.columns)}"
        )
    if column.shape or (column.dtype != TEXT and np.dtype(column.dtype).kind not in "iub"):
        raise InputError(
            f"--key must be a column of whole numbers or text, one a row. Received: {plan.key} of "
            f"{column.dtype}{list(column.shape) if column.shape else ''}"
        )


def _import(
    paths: Paths, catalog: Catalog, plan: ImportPlan, overwrite: bool, progress: ProgressCallback
) -> list[CacheSpec]:
    token = f"{_host_mark()}-{os.getpid()}-{secrets.token_hex(4)}"
    staged = paths.staged(plan.names[0], token)
    published = False
    versions: list[CacheSpec] = []
    try:
        with full_disk_as_error(paths.home):
            make_folder(paths.home, paths.staging)
            make_folder(paths.home, paths.nodes)
            staged.root.mkdir()
            targets = _make_targets(paths, plan, token)
            builders = PartitionBuilders(plan.columns, plan.block_rows, targets)
            try:
                _build(plan, builders, progress)
                for index, name in enumerate(plan.names):
                    versions.append(_complete(paths, catalog, plan, builders, token, index, name))
            finally:
                builders.stop()
            for cache in versions:
                _move_into_stores(paths, paths.staged(cache.name, token), cache)
            dropped = catalog.publish(versions, overwrite=overwrite)
            published = True
            _record_as_verified(paths, versions)
    finally:
        for name in plan.names:
            shutil.rmtree(paths.staged(name, token).root, ignore_errors=True)
        if not published:
            _remove_unpublished(catalog, versions)
    catalog.remove_files(dropped)
    return versions


def _record_as_verified(paths: Paths, caches: Sequence[CacheSpec]) -> None:
    """Spare the first training the reading of what this import wrote; copies by the system are read then."""
    for cache in caches:
        for info in cache.partitions:
            place = (info.owners[0], cache.name, cache.version, info.index)
            record_written(paths.partition(*place), info, paths.verified(*place))


def _remove_unpublished(catalog: Catalog, versions: Sequence[CacheSpec]) -> None:
    """Remove the files of `versions`, but for those published just before an interruption."""
    with contextlib.suppress(GridError):
        catalog.remove_files([v for v in versions if catalog.find(v.name, v.version) is None])


def _make_targets(paths: Paths, plan: ImportPlan, token: str) -> list[Path]:
    """Return each destination's file in the staged store of its primary owner; the first name's first."""
    targets = []
    for name in plan.names:
        for partition in range(plan.partitions):
            primary, *_ = owners_of_partition(partition, plan.topology, plan.backups)
            target = paths.staged(name, token).partition(primary, partition)
            target.parent.mkdir(parents=True, exist_ok=True)
            targets.append(target)
    return targets


def _build(plan: ImportPlan, builders: PartitionBuilders, progress: ProgressCallback) -> None:
    """Read all sources into the blocks of partitions (step B)."""
    rows = bytes_before = 0
    label_type = next((np.dtype(c.dtype) for c in plan.columns if c.name == LABEL and c.dtype != TEXT), None)
    for source in plan.sources:
        for block in _blocks(source):
            block = _labelled(plan, source, block)
            if label_type is not None and label_type.kind == "f":
                _refuse_nan_labels(source, block, rows)
            builders.append(block, _destinations(plan, block, rows))
            rows += block.rows
            progress(rows, bytes_before + block.source_bytes, plan.source_bytes)
        bytes_before += source.path.stat().st_size
    per_name = builders.rows.reshape(len(plan.names), -1).sum(axis=1)
    for name, count in zip(plan.names, per_name, strict=True):
        if not count:
            raise SourceError(
                f"{name} would have none of the {rows} row(s) of the sources. "
                + ("Give its part of the split a larger fraction" if len(plan.names) > 1 else "")
            )


def _blocks(source: Source) -> Iterator[Block]:
    """Yield the blocks of a source. Raises SourceError where it is malformed or the system refuses to read
    it."""
    try:
        blocks = iter(source.blocks(BLOCK_BYTES))
        while True:
            # Not around the `yield`: what the consumer raises isn't the file's.
            with malformed_as_error(source.path):
                block = next(blocks, None)
            if block is None:
                return
            yield block
    except OSError as error:
        if error.errno in NO_ROOM:  # of a temporary file that the source unpacks into
            raise
        raise SourceError(f"{source.path} can't be read: {error.strerror or error}") from error


def _labelled(plan: ImportPlan, source: Source, block: Block) -> Block:
    if not plan.labels:
        return block
    label = np.full(block.rows, plan.labels.index(stem(source.path)), dtype=np.int64)
    return Block({**block.columns, LABEL: label}, block.rows, block.source_bytes)


def _refuse_nan_labels(source: Source, block: Block, first_row: int) -> None:
    bad = np.isnan(block.columns[LABEL]).reshape(block.rows, -1).any(axis=1)
    if bad.any():
        raise SourceError(
            f"{source.path}: {int(bad.sum())} of the labels of rows [{first_row}, {first_row + block.rows}) "
            f"are NaN, the first in row {first_row + int(bad.argmax())}, counted over all sources. Drop or "
            f"fill these rows"
        )


def _destinations(plan: ImportPlan, block: Block, first_row: int) -> npt.NDArray[np.int64] | None:
    if len(plan.names) * plan.partitions == 1:
        return None
    if plan.key is None:
        hashes = hash_rows(first_row, first_row + block.rows)
    elif isinstance(values := block.columns[plan.key], np.ndarray):
        hashes = hash_integers(values)
    else:
        offsets, data = text_buffers(values)
        hashes = hash_texts(data, offsets)
    partition = partition_of_rows(hashes, plan.partitions)
    if len(plan.names) == 1:
        return partition
    return split_of_rows(hashes, plan.fractions) * plan.partitions + partition


def _complete(
    paths: Paths,
    catalog: Catalog,
    plan: ImportPlan,
    builders: PartitionBuilders,
    token: str,
    index: int,
    name: str,
) -> CacheSpec:
    """Complete the partitions of one of the names, and copy them to their backups (step C)."""
    staged = paths.staged(name, token)
    infos = []
    for partition in range(plan.partitions):
        owners = owners_of_partition(partition, plan.topology, plan.backups)
        destination = index * plan.partitions + partition
        size, checksum = builders.finish(destination)
        for backup in owners[1:]:
            copy = staged.partition(backup, partition)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(staged.partition(owners[0], partition), copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        infos.append(PartitionInfo(partition, int(builders.rows[destination]), size, checksum, owners))
    version = max([0, *(spec.version for spec in catalog.stored() if spec.name == name)]) + 1
    return CacheSpec(
        name,
        version,
        plan.columns,
        tuple(infos),
        plan.backups,
        plan.key,
        time.time(),
        plan.labels,
        plan.block_rows,
    )


def _move_into_stores(paths: Paths, staged: StagedPaths, cache: CacheSpec) -> None:
    """Rename the staged stores into the stores of their nodes (step D)."""
    for node in sorted({owner for p in cache.partitions for owner in p.owners}):
        source = staged.store(node)
        apply_modes(paths.home, source)
        sync_folder(source)
        target = paths.version(node, cache.name, cache.version)
        make_folder(paths.home, target.parent)
        source.rename(target)
        sync_folder(target.parent)
        sync_folder(target.parent.parent)
