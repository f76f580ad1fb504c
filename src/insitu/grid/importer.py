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
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from insitu.access import apply_modes, make_folder
from insitu.durable import sync_folder, sync_tree
from insitu.errors import CacheBusy, CacheExists, GridError, SourceError
from insitu.grid.appending import check_base, check_columns, check_copies, join_labels, share_partitions
from insitu.grid.catalog import Catalog
from insitu.grid.catalog_copy import refuse_copy
from insitu.grid.files import cache_locks, full_disk_as_error, home_errors
from insitu.grid.ignite import FieldOptions, IgniteSource
from insitu.grid.import_journal import ImportJournal, Place, find_resumable
from insitu.grid.import_plan import (
    LABEL,
    LEAST_PARTITIONS,
    ImportOptions,
    ImportPlan,
    bytes_by_node,
    check_key,
    check_partitions_in_all,
    check_room,
    choose_block_rows,
    choose_partitions,
    columns_of_caches,
    measure_rows,
    most_readable,
    read_max_mappings,
    refuse_conflicts,
)
from insitu.grid.import_sources import open_sources_of
from insitu.grid.layout import (
    check_split,
    hash_integers,
    hash_rows,
    hash_texts,
    owners_of_partition,
    partition_of_rows,
    split_of_rows,
)
from insitu.grid.leftovers import host_mark, measure_dead, sweep
from insitu.grid.manifests import commit_manifests, next_version, prepare_manifest
from insitu.grid.partition_builder import PartitionBuilders, TextsTooLong
from insitu.grid.partitions import is_variable, text_buffers
from insitu.grid.source_blocks import SourceBlocks
from insitu.grid.sources import Block, Source, stem
from insitu.grid.store_identity import update_stores
from insitu.grid.tiering import QuotaWatch, make_room
from insitu.grid.topology import load_topology
from insitu.grid.verification import record_written
from insitu.paths import Paths, StagedPaths
from insitu.spec import CacheSpec, PartitionInfo, check_cache_name

BLOCK_BYTES = 4 << 20
"""Bytes of sources that are read, and passed on, at once."""
_SYNCED_ONE_BY_ONE = 100
"""Files up to which each is made to survive a power cut alone; with more, all are at once."""
_FEWER_ROWS = 8
"""By how much a block gets fewer rows where texts turn out to be too long."""

ProgressCallback = Callable[[int, int, int | None], None]
"""Called with (rows done, bytes of the sources done, bytes of the sources in all)."""


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
    ragged: Sequence[str] = (),
    features: str | None = None,
    render: int | None = None,
    append: bool = False,
    resume: bool = False,
    compress: str | None = None,
    fields: FieldOptions | None = None,
    progress: ProgressCallback | None = None,
) -> list[CacheSpec]:
    """Import `sources` as a new version of cache `name`; return what was published.

    `partitions` defaults to 8 or, of larger data, to one for each GiB, the same number on each node.
    `column` names the values of `.npy` files, "x" unless given. `key` is the column whose hash chooses a
    row's partition; None: its index in all sources, in the order of their paths. `label_from_filename` adds
    an int64 column `label`, the index of the file's name (without suffix) among all of them, sorted. `split`
    such as {"train": 0.9, "test": 0.1} makes NAME/train and NAME/test instead, by a hash of the same,
    published together. `ragged` are columns whose rows are lists of different lengths. `features` says which
    columns the features of TFRecord files become, as in "image:uint8[28,28]=image_raw,label:int64". `render`
    makes images of so many pixels a side of the drawings in JSON lines. `append` makes a version with the
    partitions of the latest one and new ones for the rows of `sources`. `resume` goes on with what an
    interrupted call with the same arguments has done, if there is one, and keeps what it has done itself
    where it is interrupted. `compress` is "lz4" or "zstd": columns that it makes smaller by a tenth are
    compressed. `fields` says more of the columns of a cache of Ignite, which is named by its address.

    Raises InputError or SourceError for bad input, CacheExists, CacheBusy while another process imports
    into the cache, StorageFull; after any of them all is as it was before.
    """
    options = ImportOptions(
        *(partitions, backups, format, column, key, label_from_filename, overwrite, split),
        *(tuple(ragged), features, render, append, resume, fields or FieldOptions(), compress),
    )
    refuse_copy(paths)
    with home_errors(paths.home):
        catalog = Catalog(paths)
        plan = _make_plan(paths, catalog, name, sources, options)
        with cache_locks(paths, plan.names):
            _refuse_caches(catalog, plan, options)
            token, plan = _choose_token(paths, plan, resume)
            sweep(paths, plan.names, kept=token)
            return _import(paths, catalog, plan, options, token, progress or (lambda rows, done, total: None))


def _make_plan(
    paths: Paths, catalog: Catalog, name: str, sources: Sequence[str], options: ImportOptions
) -> ImportPlan:
    """Return what is to be done. Nothing is written yet. Raises what `import_cache` does."""
    refuse_conflicts(sources, options)
    names, fractions = _names_and_fractions(name, options.split)
    base = _find_base(catalog, name, options)
    if base is None:
        _refuse_existing(catalog, names, options.overwrite)
    opened, states = open_sources_of(sources, options, base)
    topology = load_topology(paths)
    is_labelled = options.label_from_filename or (base and base.labels)
    labels = {_label_of(source) for source in opened} if is_labelled else set()
    columns = columns_of_caches(opened[0], bool(labels))
    if base is not None:
        check_columns(base, columns)
        check_copies(paths, base)
    check_key(options.key, columns)
    backups = options.backups if base is None else base.backups
    owners_of_partition(0, topology, backups)
    sizes = measure_rows(opened, columns)
    least = LEAST_PARTITIONS if base is None else 1
    most = most_readable(read_max_mappings())
    partitions = choose_partitions(options.partitions, topology, sizes.bytes * max(fractions), least, most)
    check_partitions_in_all(partitions, base)
    return ImportPlan(
        names=names,
        fractions=fractions,
        sources=tuple(opened),
        states=states,
        columns=columns,
        labels=tuple(sorted(labels)) if base is None else join_labels(base, labels),
        partitions=partitions,
        backups=backups,
        key=options.key,
        topology=topology,
        block_rows=base.block_rows if base else choose_block_rows(columns, sizes, len(names) * partitions),
        sizes=sizes,
        base=base,
        codec=base.codec if base else options.compress,
        features=options.features,
        render=options.render,
    )


def _label_of(source: Source) -> str:
    return stem(Path(source.path))


def _find_base(catalog: Catalog, name: str, options: ImportOptions) -> CacheSpec | None:
    """Return the version that rows are appended to, if any. Raises InputError and UnknownCache."""
    if not options.append:
        return None
    base = catalog.get(name)
    given = {
        "--overwrite": options.overwrite,
        "--split": options.split is not None,
        "--key": options.key is not None,
        "--backups": options.backups not in (0, base.backups),
        "--label-from-filename": options.label_from_filename and not base.labels,
        "--compress": options.compress not in (None, base.codec),
    }
    check_base(base, given)
    return base


def _refuse_caches(catalog: Catalog, plan: ImportPlan, options: ImportOptions) -> None:
    """Raise CacheExists or CacheBusy where other imports have come between the plan and the lock."""
    if plan.base is None:
        _refuse_existing(catalog, plan.names, options.overwrite)
    elif (latest := catalog.get(plan.base.name)) != plan.base:
        raise CacheBusy(
            f"Another process has made version {latest.version} of {latest.name} since this import began. "
            f"Append to it by giving the command again"
        )


def _choose_token(paths: Paths, plan: ImportPlan, resume: bool) -> tuple[str, ImportPlan]:
    """Return the name of the staged folders, and the plan, as they were if there is something to go on with.

    Raises StorageFull where the import won't fit.
    """
    found = find_resumable(paths, plan) if resume else None
    if found is not None:
        token, block_rows = found
        return token, replace(plan, block_rows=block_rows)
    dead = measure_dead(paths, plan.names)  # it is removed as soon as it is known that the import fits
    check_room(paths, plan.sizes, plan.backups, plan.codec, sum(dead.values()))
    make_room(paths, {n: need - dead.get(n, 0) for n, need in bytes_by_node(plan).items()}, plan.names)
    return f"{host_mark()}-{os.getpid()}-{secrets.token_hex(4)}", plan


def _names_and_fractions(
    name: str, split: Mapping[str, float] | None
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    check_cache_name(name)
    if split is None:
        return (name,), (1.0,)
    check_split(split)
    return tuple(check_cache_name(f"{name}/{part}") for part in split), tuple(split.values())


def _refuse_existing(catalog: Catalog, names: Sequence[str], overwrite: bool) -> None:
    existing = [] if overwrite else [name for name in names if catalog.find(name)]
    if existing:
        raise CacheExists(
            f"Cache {' and '.join(existing)} exists. Give --overwrite to put a new version in its place"
        )


def _import(
    paths: Paths,
    catalog: Catalog,
    plan: ImportPlan,
    options: ImportOptions,
    token: str,
    progress: ProgressCallback,
) -> list[CacheSpec]:
    published = False
    versions: list[CacheSpec] = []
    try:
        kept = "What was written is kept: the same command goes on with it, one without --resume removes it"
        with full_disk_as_error(paths.home, kept if options.resume else "Nothing of it was kept"):
            update_stores(paths, plan.topology.nodes, make_catalog=True)
            plan, written = _write_in_blocks(paths, catalog, plan, options.resume, token, progress)
            versions += written
            make_room(paths, dict.fromkeys(plan.topology.nodes, 0), plan.names)
            for cache in versions:
                _move_into_stores(paths, plan, paths.staged(cache.name, token), cache)
            dropped = catalog.publish(versions, overwrite=options.overwrite or options.append)
            published = True
            commit_manifests(paths, versions)
            _record_as_verified(paths, plan, versions)
    finally:
        for name in plan.names:
            if published or not options.resume:
                shutil.rmtree(paths.staged(name, token).root, ignore_errors=True)
        if not published:
            _remove_unpublished(catalog, versions)
    catalog.remove_files(dropped)
    return versions


def _write_in_blocks(
    paths: Paths, catalog: Catalog, plan: ImportPlan, resume: bool, token: str, progress: ProgressCallback
) -> tuple[ImportPlan, list[CacheSpec]]:
    """Write the staged partitions, from the beginning again with fewer rows a block if texts are too long.

    Returns the plan with the rows that a block got, and the versions.
    """
    while True:
        try:
            return plan, _write_partitions(paths, catalog, plan, resume, token, progress)
        except TextsTooLong:
            if plan.base is not None:
                raise SourceError(
                    f"What is appended must be like the rows of the cache, whose blocks are of "
                    f"{plan.block_rows} rows. Received: texts so much longer that a block doesn't fit into "
                    f"memory. Import all rows again with --overwrite"
                ) from None
            plan = replace(plan, block_rows=max(1, plan.block_rows // _FEWER_ROWS))
            for name in plan.names:
                shutil.rmtree(paths.staged(name, token).root)


def _write_partitions(
    paths: Paths, catalog: Catalog, plan: ImportPlan, resume: bool, token: str, progress: ProgressCallback
) -> list[CacheSpec]:
    """Write the staged partitions (steps B and C). Returns the versions that they make."""
    make_folder(paths.home, paths.staging)
    make_folder(paths.home, paths.nodes)
    for name in plan.names:
        paths.staged(name, token).root.mkdir(exist_ok=True)
    journal = ImportJournal(paths, plan, token) if resume else None
    targets = _make_targets(paths, plan, token)
    builders = PartitionBuilders(
        plan.columns, plan.block_rows, targets, drop_pages=not plan.fits_into_memory, codec=plan.codec
    )
    try:
        _build(plan, builders, journal, progress, QuotaWatch(paths, plan.topology.nodes, plan.names))
        return [
            _complete(paths, catalog, plan, builders, token, index, name)
            for index, name in enumerate(plan.names)
        ]
    finally:
        builders.stop()


def _record_as_verified(paths: Paths, plan: ImportPlan, caches: Sequence[CacheSpec]) -> None:
    """Spare the first training the reading of what this import wrote; copies by the system are read then."""
    for cache in caches:
        for info in cache.partitions[plan.first_partition :]:
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
        for partition in plan.new_partitions:
            primary, *_ = owners_of_partition(partition, plan.topology, plan.backups)
            target = paths.staged(name, token).partition(primary, partition)
            target.parent.mkdir(parents=True, exist_ok=True)
            targets.append(target)
    return targets


def _build(
    plan: ImportPlan,
    builders: PartitionBuilders,
    journal: ImportJournal | None,
    progress: ProgressCallback,
    quotas: QuotaWatch,
) -> None:
    """Read all sources into the blocks of partitions (step B)."""
    place = Place(0, 0, 0, 0, ())
    if journal is not None:
        adopted = builders.adopt()
        place = journal.find_place(adopted)
        builders.begin_at(np.array(place.counts), adopted)
    rows, first_row = place.rows, plan.first_row
    progress(rows, place.bytes, plan.source_bytes)
    bytes_before = [0, *itertools.accumulate(state.size for state in plan.states)]
    labels = [np.dtype(c.dtype) for c in plan.columns if c.name == LABEL and not is_variable(c)]
    label_type = labels[0] if labels else None
    numbers = {label: number for number, label in enumerate(plan.labels)}
    with SourceBlocks(plan.sources, plan.states, BLOCK_BYTES, (place.source, place.start)) as blocks:
        for item in blocks:
            source = plan.sources[item.source]
            block = _labelled(numbers, source, item.block)
            if label_type is not None and label_type.kind == "f":
                _refuse_nan_labels(source, block, rows)
            builders.append(block, _destinations(plan, block, first_row + rows))
            rows += block.rows
            bytes_done = bytes_before[item.source] + block.source_bytes
            progress(rows, bytes_done, plan.source_bytes)
            quotas.check(bytes_done)
            if journal is not None:
                journal.note(item.source, block.next_start, rows, bytes_done, builders.rows)
    _refuse_empty_caches(plan, builders)


def _refuse_empty_caches(plan: ImportPlan, builders: PartitionBuilders) -> None:
    rows = int(builders.rows.sum())
    per_name = builders.rows.reshape(len(plan.names), -1).sum(axis=1)
    for name, count in zip(plan.names, per_name, strict=True):
        if not count:
            raise SourceError(
                f"{name} would have none of the {rows} row(s) of the sources. "
                + ("Give its part of the split a larger fraction" if len(plan.names) > 1 else "")
            )


def _labelled(numbers: Mapping[str, int], source: Source, block: Block) -> Block:
    if not numbers:
        return block
    label = np.full(block.rows, numbers[_label_of(source)], dtype=np.int64)
    return replace(block, columns={**block.columns, LABEL: label})


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
    one_by_one = plan.partitions * (1 + plan.backups) <= _SYNCED_ONE_BY_ONE
    infos = [] if plan.base is None else list(plan.base.partitions)
    for number, partition in enumerate(plan.new_partitions):
        owners = owners_of_partition(partition, plan.topology, plan.backups)
        destination = index * plan.partitions + number
        size, checksum = builders.finish(destination, sync=one_by_one)
        for backup in owners[1:]:
            copy = staged.partition(backup, partition)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(staged.partition(owners[0], partition), copy)
            if one_by_one:
                with copy.open("rb") as file:
                    os.fsync(file.fileno())
        rows, raw_bytes = int(builders.rows[destination]), builders.raw_bytes(destination)
        infos.append(PartitionInfo(partition, rows, size, checksum, owners, raw_bytes))
    if not one_by_one:
        sync_tree(staged.root)
    version = next_version(paths, catalog, name)
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
        plan.codec,
        plan.sum_column_bytes(builders.column_bytes(index * plan.partitions, plan.partitions)),
        next((source.origin for source in plan.sources if isinstance(source, IgniteSource)), None),
    )


def _move_into_stores(paths: Paths, plan: ImportPlan, staged: StagedPaths, cache: CacheSpec) -> None:
    """Rename the staged stores into the stores of their nodes (step D)."""
    nodes = sorted({owner for p in cache.partitions for owner in p.owners})
    for node in nodes:
        make_folder(paths.home, staged.store(node))
        apply_modes(paths.home, staged.store(node))
    if plan.base is not None:
        share_partitions(paths, plan.base, staged, cache.version)
    for node in nodes:
        source = staged.store(node)
        prepare_manifest(paths, node, cache, staged.manifest(node))
        sync_folder(source)
        target = paths.version(node, cache.name, cache.version)
        make_folder(paths.home, target.parent)
        source.rename(target)
        sync_folder(target.parent)
        sync_folder(target.parent.parent)
