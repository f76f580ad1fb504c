"""`insitu import`: rows from sources into the partitions of a new version of a cache.

    A  find the sources and read their headers; all must have the same columns
    B  read them block by block, here or on the nodes; hash each row to its split and partition; give it to
       the partition's owners, on whatever host; whenever a partition has a block of rows, write it into the
       owner's staged store
    C  complete the partitions, read them back, compare all copies
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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from insitu.base.disk.access import make_folder
from insitu.base.errors import CacheBusy, CacheExists, InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, PartitionInfo, check_cache_name
from insitu.base.wording import format_count, inflect
from insitu.grid.catalog import (
    Catalog,
    cache_locks,
    commit_manifests,
    full_disk_as_error,
    home_errors,
    host_mark,
    measure_dead,
    refuse_copy,
    sweep,
)
from insitu.grid.ignite import FieldOptions, is_ignite_address, open_ignite
from insitu.grid.importing.appending import (
    check_base,
    check_columns,
    join_labels,
    options_of_base,
    share_unchanged,
)
from insitu.grid.importing.import_journal import ImportJournal, Place, find_resumable
from insitu.grid.importing.import_owners import (
    ImportOwners,
    failures_explained,
    record_as_verified,
    remove_unpublished,
)
from insitu.grid.importing.node_reading import NodeReading, check_seen
from insitu.grid.importing.row_routing import RowRouter
from insitu.grid.importing.server_reading import place_rows, read_on_hosts
from insitu.grid.intake import (
    LABEL,
    LEAST_PARTITIONS,
    FileState,
    Finished,
    ImportOptions,
    ImportPlan,
    RowPlan,
    SourceBlocks,
    TextsTooLong,
    add_labels,
    bytes_by_node,
    check_key,
    check_owners,
    check_partitions_in_all,
    check_room,
    choose_block_rows,
    choose_partitions,
    columns_of_caches,
    describe_origin,
    find_destinations,
    label_of,
    measure_rows,
    most_readable,
    read_max_mappings,
    refuse_conflicts,
    refuse_nan_labels,
)
from insitu.grid.layout import check_split
from insitu.grid.partitions import is_variable
from insitu.grid.ray_data import RayReader, open_ray_sources
from insitu.grid.sources import (
    Source,
    SourceFile,
    SourceOptions,
    UrlFile,
    check_reading,
    find_sources,
    is_url,
    open_sources,
)
from insitu.grid.stores import QuotaWatch, check_quotas

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores


BLOCK_BYTES = 4 << 20
"""Bytes of sources that are read, and passed on, at once."""
_TIMES_SENT = 2
"""The factor on these bytes if rows go to other hosts: fewer messages take less of the processors."""
_FEWER_ROWS = 8
"""The factor by which a block gets fewer rows if texts turn out to be too long."""

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
    beside_servers: bool = False,
    after: CacheSpec | None = None,
    progress: ProgressCallback | None = None,
    remote: RemoteStores | None = None,
    read_on: str | None = None,
    reader: RayReader | None = None,
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
    partitions of the latest one and new ones for the rows of `sources`. `resume` continues what an
    interrupted call with the same arguments has done, if there is one, and keeps its own part if it is
    interrupted. `compress` is "lz4" or "zstd": columns that it makes smaller by a tenth are compressed.
    `fields` says more of the columns of a cache of Ignite, which is named by its address; `beside_servers`
    keeps its partitions, each on the node beside the server that is primary for it, or on its node in the
    version `after`, whose files are shared if rows are as they were. `remote` are the agents of the cluster
    whose head has this home, if it has one: partitions go to them. `read_on` is "nodes" if these agents read
    the sources themselves, which must be paths that all see, or URLs; "here" if this process reads them;
    None: URLs are read by nodes, paths here. `reader` is one of Ray Data that reads them instead, on the
    nodes of a Ray cluster or here; `fields` says then which columns of bytes are tensors, and which are left
    out.

    Raises InputError or SourceError for bad input, CacheExists, CacheBusy while another process imports into
    the cache, StorageFull, TransferError if an agent fails; after any of them all is as it was before.
    """
    options = ImportOptions(
        *(partitions, backups, format, column, key, label_from_filename, overwrite, split),
        *(
            tuple(ragged),
            features,
            render,
            append,
            resume,
            fields or FieldOptions(),
            compress,
            beside_servers,
        ),
        read_on=read_on,
        after=after,
        reader=reader,
    )
    refuse_copy(paths)
    with home_errors(paths.home), reader or contextlib.nullcontext():
        catalog, owners = Catalog(paths, of_one_head=True), ImportOwners(paths, remote)
        plan = _make_plan(owners, catalog, name, sources, options)
        with cache_locks(paths, plan.names):
            _refuse_caches(catalog, plan, options)
            owners.check_room(bytes_by_node(plan), plan.names)
            if plan.base is None and not overwrite:
                owners.refuse_unlisted(plan.names)
            token, plan = _choose_token(paths, owners, plan, resume)
            sweep(paths, plan.names, kept=token)
            report = progress or (lambda rows, done, total: None)
            return _import(paths, catalog, owners, plan, options, token, report)


def _make_plan(
    owners: ImportOwners, catalog: Catalog, name: str, sources: Sequence[str], options: ImportOptions
) -> ImportPlan:
    """Return the plan of the import. Nothing is written yet. Raises what `import_cache` does."""
    refuse_conflicts(sources, options)
    names, fractions = _names_and_fractions(name, options.split)
    base = _find_base(catalog, name, options)
    if base is None:
        _refuse_existing(catalog, names, options.overwrite)
    opened, states = open_sources_of(sources, options, base)
    on_nodes = reads_on_nodes(opened, options, in_cluster=owners.remote is not None)
    if on_nodes and owners.remote is not None:
        with failures_explained():
            check_seen(owners.remote, opened, states)
    is_labelled = options.label_from_filename or (base and base.labels)
    labels = {label_of(source) for source in opened} if is_labelled else set()
    columns = columns_of_caches(opened[0], bool(labels))
    if base is not None:
        check_columns(base, columns)
        owners.check_base(base)
    check_key(options.key, columns)
    backups = options.backups if base is None else base.backups
    check_owners(owners.topology, backups)
    sizes = measure_rows(opened, columns)
    least = LEAST_PARTITIONS if base is None else 1
    most = most_readable(read_max_mappings())
    size = sizes.bytes * max(fractions)
    primaries, hosts = place_rows(opened[0], owners, options)
    partitions = len(primaries) or choose_partitions(options.partitions, owners.topology, size, least, most)
    like = base or options.after
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
        topology=owners.topology,
        block_rows=like.block_rows if like else choose_block_rows(columns, sizes, len(names) * partitions),
        sizes=sizes,
        base=base,
        codec=base.codec if base else options.compress,
        features=options.features,
        render=options.render,
        primaries=primaries,
        hosts=hosts,
        node_options=options_for_nodes(opened, options, base) if on_nodes else None,
        reader=tuple(options.reader.request.describe()) if options.reader else (),
    )


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
    """Raise CacheExists or CacheBusy if other imports have come between the plan and the lock."""
    if plan.base is None:
        _refuse_existing(catalog, plan.names, options.overwrite)
    elif (latest := catalog.get(plan.base.name)) != plan.base:
        raise CacheBusy(
            f"Another process has made version {latest.version} of {latest.name} since this import began. "
            f"Append to it by giving the command again"
        )


def _choose_token(
    paths: Paths, owners: ImportOwners, plan: ImportPlan, resume: bool
) -> tuple[str, ImportPlan]:
    """Return the name of the staged folders, and the plan, as they were if there is something to continue.

    Raises StorageFull if the import won't fit.
    """
    found = find_resumable(paths, plan) if resume else None
    if found is not None:
        token, block_rows = found
        return token, replace(plan, block_rows=block_rows)
    dead = measure_dead(paths, plan.names)  # it is removed as soon as it is known that the import fits
    held = [owners.keep_here(plan.owners_of(partition)) for partition in plan.new_partitions]
    copies = sum(map(len, held)) / plan.partitions
    check_room(paths, plan.sizes, copies, plan.codec, sum(dead.values()))
    needs = bytes_by_node(plan)
    check_quotas(paths, {n: needs[n] - dead.get(n, 0) for n in owners.keep_here(needs)})
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
            f"{inflect(len(existing), 'Cache', 'Caches')} {' and '.join(existing)} "
            f"{inflect(len(existing), 'exists', 'exist')}. Give --overwrite to import a new version"
        )


def _import(
    paths: Paths,
    catalog: Catalog,
    owners: ImportOwners,
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
            owners.note_stores()
            plan, written = _write_in_blocks(paths, catalog, owners, plan, options.resume, token, progress)
            versions += written
            check_quotas(paths, dict.fromkeys(owners.keep_here(plan.topology.nodes), 0))
            shared: frozenset[int] = frozenset()
            for cache in versions:
                if options.after is not None:
                    shared = share_unchanged(paths, options.after, paths.staged(cache.name, token), cache)
                owners.put_in_place(token, cache, plan.base)
            dropped = catalog.publish(versions, overwrite=options.overwrite or options.append)
            published = True
            commit_manifests(paths, versions)
            record_as_verified(paths, versions, plan.first_partition, shared)
    finally:
        for name in plan.names:
            if published or not options.resume:
                shutil.rmtree(paths.staged(name, token).root, ignore_errors=True)
        if not published:
            remove_unpublished(catalog, versions)
        owners.end(catalog, token, plan.names, versions, kept=options.resume)
    catalog.remove_files(dropped)
    return versions


def _write_in_blocks(
    paths: Paths,
    catalog: Catalog,
    owners: ImportOwners,
    plan: ImportPlan,
    resume: bool,
    token: str,
    progress: ProgressCallback,
) -> tuple[ImportPlan, list[CacheSpec]]:
    """Write the staged partitions, from the beginning again with fewer rows a block if texts are too long.

    Returns the plan with the rows that a block got, and the versions.
    """
    while True:
        try:
            return plan, _write_partitions(paths, catalog, owners, plan, resume, token, progress)
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
    paths: Paths,
    catalog: Catalog,
    owners: ImportOwners,
    plan: ImportPlan,
    resume: bool,
    token: str,
    progress: ProgressCallback,
) -> list[CacheSpec]:
    """Write the staged partitions (steps B and C). Returns the versions that they make."""
    make_folder(paths.home, paths.staging)
    make_folder(paths.home, paths.nodes)
    for name in plan.names:
        paths.staged(name, token).root.mkdir(exist_ok=True)
    journal = ImportJournal(paths, plan, token) if resume else None
    rows, remote = RowPlan.of(plan, token), owners.remote
    on_nodes = plan.is_read_by_nodes
    here = [] if on_nodes else owners.keep_here(plan.topology.nodes)
    readers = remote.all_nodes if remote is not None and on_nodes else ()
    router = RowRouter(paths, rows, here, remote, readers)
    try:
        with failures_explained():
            adopted = router.open(adopt=journal is not None)
            place = Place(0, 0, 0, 0, (0,) * len(adopted)) if journal is None else journal.find_place(adopted)
            if remote is not None and plan.hosts is not None:
                units = read_on_hosts(remote, plan, plan.hosts, rows, router, progress)
            elif remote is not None and on_nodes:
                units = _build_on_nodes(plan, rows, remote, router, journal, place, progress)
            else:
                router.begin(0, place.counts)
                _build(plan, router, journal, place, progress, QuotaWatch(paths, here))
                units = 1
            _refuse_empty_caches(plan, router.rows)
            finished = router.finish(units)
        return [
            _describe_version(owners.choose_version(catalog, name), plan, index, finished)
            for index, name in enumerate(plan.names)
        ]
    finally:
        router.stop(close=resume or on_nodes)  # otherwise what ends the import does it


def _build(
    plan: ImportPlan,
    router: RowRouter,
    journal: ImportJournal | None,
    place: Place,
    progress: ProgressCallback,
    quotas: QuotaWatch,
) -> None:
    """Read all sources, and give their rows to the owners of partitions (step B)."""
    rows, first_row = place.rows, plan.first_row
    progress(rows, place.bytes, plan.source_bytes)
    bytes_before = [0, *itertools.accumulate(state.size for state in plan.states)]
    labels = [np.dtype(c.dtype) for c in plan.columns if c.name == LABEL and not is_variable(c)]
    label_type = labels[0] if labels else None
    numbers = {label: number for number, label in enumerate(plan.labels)}
    block_bytes = BLOCK_BYTES * (_TIMES_SENT if router.owners_elsewhere else 1)
    with SourceBlocks(plan.sources, plan.states, block_bytes, (place.source, place.start)) as blocks:
        for item in blocks:
            source = plan.sources[item.source]
            block = add_labels(numbers, source, item.block)
            if label_type is not None and label_type.kind == "f":
                refuse_nan_labels(source, block, rows)
            router.append(block, find_destinations(plan, block, first_row + rows))
            rows += block.rows
            bytes_done = bytes_before[item.source] + block.source_bytes
            progress(rows, bytes_done, plan.source_bytes)
            quotas.check(bytes_done)
            if journal is not None:
                journal.note(item.source, block.next_start, rows, bytes_done, router.rows)


def _build_on_nodes(
    plan: ImportPlan,
    rows: RowPlan,
    remote: RemoteStores,
    router: RowRouter,
    journal: ImportJournal | None,
    place: Place,
    progress: ProgressCallback,
) -> int:
    """Have nodes read all sources (step B). Returns the number of units."""
    done = place.bytes

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(int(router.rows.sum()), min(done, plan.source_bytes), plan.source_bytes)

    reading = NodeReading(remote, plan, count)
    reading.number_rows()
    router.begin(place.source, place.counts)
    progress(place.rows, place.bytes, plan.source_bytes)
    reading.read(rows, place, journal, router.note_rows)
    progress(int(router.rows.sum()), plan.source_bytes, plan.source_bytes)
    return len(reading.units)


def _refuse_empty_caches(plan: ImportPlan, found: npt.NDArray[np.int64]) -> None:
    rows = int(found.sum())
    per_name = found.reshape(len(plan.names), -1).sum(axis=1)
    for name, count in zip(plan.names, per_name, strict=True):
        if not count:
            raise SourceError(
                f"{name} would have none of the {format_count(rows, 'row')} of the sources. "
                + ("Give its part of the split a larger fraction" if len(plan.names) > 1 else "")
            )


def _describe_version(version: int, plan: ImportPlan, index: int, finished: Sequence[Finished]) -> CacheSpec:
    """Return the new version of one of the names, whose partitions are complete (step C)."""
    own = finished[index * plan.partitions : (index + 1) * plan.partitions]
    infos = [] if plan.base is None else list(plan.base.partitions)
    for partition, each in zip(plan.new_partitions, own, strict=True):
        owners = plan.owners_of(partition)
        infos.append(PartitionInfo(partition, each.rows, each.bytes, each.checksum, owners, each.raw_bytes))
    sizes = np.array([each.column_bytes for each in own], dtype=np.int64).sum(axis=0)
    return CacheSpec(
        plan.names[index],
        version,
        plan.columns,
        tuple(infos),
        plan.backups,
        plan.key,
        time.time(),
        plan.labels,
        plan.block_rows,
        plan.codec,
        plan.sum_column_bytes([(int(raw), int(stored)) for raw, stored in sizes]),
        describe_origin(plan),
    )


# The sources of an import: files, or a cache of Ignite, opened as the options say


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


def find_source_files(sources: Sequence[str], options: Any) -> list[str]:
    """Return the files of this machine that an import reads, in its order; none if the sources are elsewhere.

    They are opened, to see that they can be read. `options` has the parameters of `import_cache` that are
    about reading files, and `append`. Raises InputError, SourceError.
    """
    if all(is_ignite_address(source) or is_url(source) for source in sources):
        return []
    files = find_sources(sources, options.format)
    if not options.append:  # what the cache says of its columns isn't known here
        open_sources(files, _read_options(files, options, tuple(_MEANINGS)))
    return [str(file) for file, _ in files]


def check_names(
    paths: Paths, name: str, *, split: Mapping[str, float] | None, overwrite: bool, append: bool
) -> None:
    """Raise what `import_cache` raises for the name of a cache, before it reads anything."""
    catalog = Catalog(paths, of_one_head=True)
    names, _ = _names_and_fractions(name, split)
    if append:
        catalog.get(name)
    else:
        _refuse_existing(catalog, names, overwrite)


def reads_on_nodes(opened: Sequence[Source], options: ImportOptions, *, in_cluster: bool) -> bool:
    """Return whether nodes read the sources themselves. Raises InputError if they can't."""
    if options.reader is not None:
        return False  # nodes of Ray do, if `read_on` says so
    if options.read_on == "nodes" and not in_cluster:
        raise InputError(
            "--read-on nodes has the nodes of a cluster read the sources. Received: a home without one. "
            "Leave it out, or bring up agents with `insitu up --hosts FILE`"
        )
    wanted = options.read_on == "nodes" or (options.read_on is None and isinstance(opened[0].path, UrlFile))
    return in_cluster and wanted


def _read_options(
    files: Sequence[tuple[str | SourceFile, str]], options: Any, names: Sequence[str]
) -> SourceOptions:
    """Return what the user adds to what is in the files. Raises InputError if their format doesn't take one
    of the named options."""
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name, value in given.items():
        format, meaning = _MEANINGS[name]
        other = next((f"{path} of format {kind}" for path, kind in files if kind != format), None)
        if other is not None:
            raise InputError(f"--{name} {meaning}. Received: --{name} {value} for {other}. Leave it out")
    check_reading(options.features, options.render)
    return SourceOptions(ragged_columns=frozenset(options.ragged), **given)
