"""`insitu import`: rows from sources into the partitions of a new version of a cache.

    inspect  find the sources and read their headers; all must have the same columns
    plan     choose the partitions and their owners; lock the caches, and see that there is room
    read     read the sources block by block, here or on the nodes, and prepare the rows (`ImportRows`)
    route    hash each row to its split and partition; give it to the stores that hold this, on whatever host
    build    whenever a partition has a block of rows, write it into the staged store; at the end complete
             the partitions, read them back, compare all copies
    publish  rename the staged stores into the stores of their nodes; publish all versions in one transaction
             of the catalogue; only now does anybody see them

An import that dies before the transaction leaves the old version as it was, and files that no reader sees.
The next import, `insitu caches` or `insitu nodes` removes them. Files belong to a living import if it holds
the kernel's lock on the cache, which ends with its process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from insitu.base.disk.access import make_folder
from insitu.base.errors import CacheBusy, CacheExists, DamagedImages, InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, PartitionInfo, check_cache_name
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
from insitu.grid.importing.appending import (
    check_base,
    check_columns,
    join_labels,
)
from insitu.grid.importing.import_journal import ImportJournal, Place, find_resumable
from insitu.grid.importing.import_sources import (
    all_missing_values_named,
    command_advised,
    open_sources_of,
    options_for_nodes,
    reads_on_nodes,
    remedies_shown,
)
from insitu.grid.importing.import_targets import (
    ImportOwners,
    choose_owners,
    failures_explained,
    record_as_verified,
    remove_unpublished,
)
from insitu.grid.importing.node_reader import NodeReading, check_seen
from insitu.grid.importing.row_router import RowRouter
from insitu.grid.importing.server_reading import place_rows, read_on_hosts
from insitu.grid.intake import (
    FILENAME,
    FOLDER,
    LEAST_PARTITIONS,
    Destination,
    FileState,
    Finished,
    ImportPlan,
    ImportRows,
    RowPlan,
    SourceBlocks,
    TextsTooLong,
    bytes_by_node,
    check_key,
    check_partitions_in_all,
    check_room,
    choose_block_rows,
    choose_partitions,
    columns_of_rows,
    cut_block,
    describe_origin,
    find_earlier,
    fits_into_memory,
    label_of,
    measure_rows,
    most_readable,
    read_max_mappings,
    refuse_conflicts,
)
from insitu.grid.layout import check_split, owners_of_partition
from insitu.grid.ray_data import RayReader, parse_reader
from insitu.grid.sources import (
    BatchStream,
    ColumnOptions,
    FileGroup,
    Source,
    SourceOptions,
    labels_of,
    read_columns,
    skipped_of,
)
from insitu.grid.stores import QuotaWatch, check_quotas
from insitu.options import ImportOptions

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


@dataclass(frozen=True, slots=True)
class ImportJob:
    """One import: what was asked for, and the stores that it writes to. All steps share it."""

    #: The home of its catalogue.
    paths: Paths
    #: What was asked for.
    options: ImportOptions
    #: The options of columns of tables of other systems, and of files that Ray reads.
    fields: ColumnOptions
    #: The reader of Ray Data that reads the sources; None: insitu reads them.
    reader: RayReader | None
    #: Whether partitions are those of the table, each on the node beside the server that is primary for it.
    beside_servers: bool
    #: The version that the new one follows in a job: its columns, its partitions and their nodes stay.
    after: CacheSpec | None
    #: The catalogue in which versions are published.
    catalog: Catalog
    #: The owners of partitions.
    owners: ImportOwners
    #: What is called as rows are read.
    progress: ProgressCallback
    #: Rows of an object of Python, in the place of sources; None: there are sources.
    data: BatchStream | None
    #: What is called with each thing that was inferred of a source.
    note: Callable[[str], None]
    #: What is wrong with each image that was left out.
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is known of the sources once their headers were read."""

    #: The opened sources, in the order of their rows.
    sources: Sequence[Source]
    #: The state of the file of each, before.
    states: tuple[FileState, ...]
    #: The columns that the caches get.
    columns: tuple[Column, ...]
    #: The names of the classes of column `label`; empty if they have none.
    labels: tuple[str, ...]
    #: The names that make column `label`, as in `RowPlan`.
    label_from: str
    #: The version that rows are appended to; None: none.
    base: CacheSpec | None
    #: How nodes read the sources; None: they don't.
    node_options: SourceOptions | None


def import_cache(
    paths: Paths,
    name: str,
    sources: Sequence[str],
    *,
    progress: ProgressCallback | None = None,
    remote: RemoteStores | None = None,
    **options: Any,
) -> list[CacheSpec]:
    """Import `sources` as a new version of cache `name`; return what was published.

    `options` are the fields of `ImportOptions`, those of `insitu import`. Else as `run_import`.
    """
    given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    return run_import(paths, ImportOptions(name, tuple(sources), **given), progress=progress, remote=remote)


def run_import(
    paths: Paths,
    options: ImportOptions,
    *,
    progress: ProgressCallback | None = None,
    note: Callable[[str], None] | None = None,
    remote: RemoteStores | None = None,
    beside_servers: bool = False,
    after: CacheSpec | None = None,
    data: BatchStream | None = None,
) -> list[CacheSpec]:
    """Import as `options` say; return the versions that were published. `note` gets what is inferred.

    `remote` are the agents of the cluster whose head has this home, if it has one: partitions go to them.
    `beside_servers` keeps the partitions of a table of another system, each on the node beside the server
    that is primary for it, or on its node in the version `after`. Files are shared with the version before,
    of partitions whose rows are as they were. `data`: the rows of an object of Python, in the place of
    `options.sources`.

    Raises InputError or SourceError for bad input, CacheExists, CacheBusy while another process imports into
    the cache, StorageFull, TransferError if an agent fails; after any of them all is as it was before.
    """
    with _begun(paths, options, progress, note, remote, beside_servers, after, data) as (job, plan):
        read = [(each.path, each.format) for each in plan.sources]
        with cache_locks(paths, plan.rows.names), command_advised(options, read):
            published = _write_and_publish(job, _reserve(job, plan))
    if job.skipped:
        (note or warnings.warn)(f"Images left out: {DamagedImages.describe(tuple(job.skipped))}")
    return published


def plan_import(
    paths: Paths,
    options: ImportOptions,
    *,
    note: Callable[[str], None] | None = None,
    remote: RemoteStores | None = None,
) -> ImportPlan:
    """Return what `run_import` would do, and do nothing. Raises what it raises before it writes."""
    with _begun(paths, options, None, note, remote, False, None, None) as (_, plan):
        return plan


@contextlib.contextmanager
def _begun(
    paths: Paths,
    options: ImportOptions,
    progress: ProgressCallback | None,
    note: Callable[[str], None] | None,
    remote: RemoteStores | None,
    beside_servers: bool,
    after: CacheSpec | None,
    data: BatchStream | None,
) -> Iterator[tuple[ImportJob, ImportPlan]]:
    """Yield an import whose sources have been inspected, and its plan."""
    columns = read_columns(options)
    request = parse_reader(options.reader, options.reader_options)
    reader = None if request is None else RayReader(request)
    refuse_copy(paths)
    with (
        home_errors(paths.home),
        reader or contextlib.nullcontext(),
        remedies_shown(options, in_python=data is not None),
    ):
        job = ImportJob(
            paths=paths,
            options=options,
            fields=columns,
            reader=reader,
            beside_servers=beside_servers,
            after=after,
            catalog=Catalog(paths, of_one_head=True),
            owners=choose_owners(paths, remote),
            progress=progress or (lambda rows, done, total: None),
            data=data,
            note=note or (lambda text: None),
        )
        yield job, make_plan(job, inspect_sources(job))


# Inspect: which rows there are


def inspect_sources(job: ImportJob) -> Inspected:
    """Return what the headers of the sources say. Raises what `run_import` does."""
    options, owners = job.options, job.owners
    if options.skip_damaged and options.resume:
        raise InputError(
            "--skip-damaged names all images that an import has left out. Received: it with --resume, whose "
            "import may have left out some before. Leave one of them out"
        )
    refuse_conflicts(options, job.fields, None if job.reader is None else job.reader.request)
    names, _ = _names_and_fractions(options)
    base = job.catalog.get(options.cache) if options.append else None
    if base is not None:
        check_base(base, options)
    else:
        _refuse_existing(job.catalog, names, options.overwrite)
    opened, states = open_sources_of(options, job.data, job.reader, base)
    on_nodes = reads_on_nodes(opened, options, in_cluster=owners.remote is not None)
    if on_nodes and owners.remote is not None:
        with failures_explained():
            check_seen(owners.remote, opened, states)
    label_from = _choose_labels(options, opened, base)
    own = labels_of(opened[0])
    labels = {label_of(source, label_from) for source in opened} if label_from else set(own)
    columns = columns_of_rows(opened[0], label_from, options.row_id)
    if base is not None:
        check_columns(base, columns)
        owners.check_base(base)
    noted: dict[str, list[str]] = {}
    for source in opened:
        for each in getattr(source, "notes", ()):
            noted.setdefault(each, []).append(str(source.path))
    for text, places in noted.items():
        job.note(f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {text}")
    return Inspected(
        sources=opened,
        states=states,
        columns=columns,
        labels=(own or tuple(sorted(labels))) if base is None else join_labels(base, labels, own),
        label_from=label_from,
        base=base,
        node_options=options_for_nodes(opened, options, base) if on_nodes else None,
    )


def _choose_labels(options: ImportOptions, opened: Sequence[Source], base: CacheSpec | None) -> str:
    """Return the names that make column `label`: FILENAME, FOLDER, or an empty text. Raises InputError."""
    if options.label_from_filename and options.label_from_folder:
        raise InputError(
            "Labels come from the names of files or of folders. Received: --label-from-filename and "
            "--label-from-folder. Leave one out"
        )
    grouped = next((each.path for each in opened if isinstance(each.path, FileGroup)), None)
    if options.label_from_filename and grouped is not None and len(grouped.files) > 1:
        raise InputError(
            f"--label-from-filename takes one file per class. Received: {grouped}, with a row each. Put the "
            f"files of each class into a folder, and give --label-from-folder"
        )
    if options.label_from_filename or options.label_from_folder:
        return FOLDER if options.label_from_folder else FILENAME
    if base is None or not base.labels or labels_of(opened[0]):
        return ""
    by_folder = {label_of(source, FOLDER) for source in opened} <= set(base.labels)
    by_file = {label_of(source, FILENAME) for source in opened} <= set(base.labels)
    if grouped is not None or (by_folder and not by_file):
        raise InputError(
            f"The rows of {base.name} have labels, and so have those that are appended. Received: folders "
            f"that may name them. Give --label-from-folder if they do, or --label-from-filename"
        )
    return FILENAME


def _names_and_fractions(options: ImportOptions) -> tuple[tuple[str, ...], tuple[float, ...]]:
    check_cache_name(options.cache)
    if options.split is None:
        return (options.cache,), (1.0,)
    check_split(options.split)
    names = tuple(check_cache_name(f"{options.cache}/{part}") for part in options.split)
    return names, tuple(options.split.values())


def _refuse_existing(catalog: Catalog, names: Sequence[str], overwrite: bool) -> None:
    existing = [] if overwrite else [name for name in names if catalog.find(name)]
    if existing:
        raise CacheExists(
            f"{inflect(len(existing), 'Cache', 'Caches')} {' and '.join(existing)} "
            f"{inflect(len(existing), 'exists', 'exist')}. Give --overwrite to import a new version"
        )


# Plan: which partitions they make, and who holds these


def make_plan(job: ImportJob, found: Inspected) -> ImportPlan:
    """Return the plan of the import. Nothing is written yet. Raises what `run_import` does."""
    options, owners, base = job.options, job.owners, found.base
    names, fractions = _names_and_fractions(options)
    check_key(options.key, found.columns)
    backups = options.backups if base is None else base.backups
    owners_of_partition(0, owners.topology, backups)  # there are enough nodes for so many copies
    sizes = measure_rows(found.sources, found.columns, options.limit, options.sample)
    primaries, hosts = place_rows(found.sources[0], owners, job.after, job.beside_servers)
    partitions = len(primaries) or choose_partitions(
        options.partitions,
        owners.topology,
        sizes.bytes * max(fractions),
        LEAST_PARTITIONS if base is None else 1,
        most_readable(read_max_mappings()),
    )
    check_partitions_in_all(partitions, base)
    like, first = base or job.after, 0 if base is None else len(base.partitions)
    numbers = range(first, first + partitions)
    holders = {p: primaries[p : p + 1] or owners_of_partition(p, owners.topology, backups) for p in numbers}
    destinations = tuple(Destination(name, p, holders[p]) for name in names for p in numbers)
    own_rows = choose_block_rows(found.columns, sizes, len(destinations), is_repeated=bool(primaries))
    rows = RowPlan(
        token="",
        names=names,
        fractions=fractions,
        partitions=partitions,
        columns=found.columns,
        labels=found.labels,
        label_from=found.label_from,
        key=options.key,
        block_rows=like.block_rows if like else own_rows,
        codec=base.codec if base else options.compress,
        drop_pages=not fits_into_memory(sizes),
        primaries=primaries,
        sample=None if options.sample == 1 else options.sample,
        row_id=options.row_id,
        destinations=destinations,
    )
    return ImportPlan(
        options=options,
        sources=tuple(found.sources),
        states=found.states,
        rows=rows,
        backups=backups,
        topology=owners.topology,
        sizes=sizes,
        base=base,
        node_options=found.node_options,
        reader=tuple(job.reader.request.describe()) if job.reader else (),
        hosts=hosts,
    )


def _reserve(job: ImportJob, plan: ImportPlan) -> ImportPlan:
    """Return the plan with the name of the staged folders, and as it was if there is something to continue.

    The caches are locked. Raises CacheExists or CacheBusy if other imports have come between the plan and the
    lock, StorageFull if the import won't fit.
    """
    paths, owners, names = job.paths, job.owners, plan.rows.names
    if plan.base is None:
        _refuse_existing(job.catalog, names, job.options.overwrite)
    elif (latest := job.catalog.get(plan.base.name)) != plan.base:
        raise CacheBusy(
            f"Another process has made version {latest.version} of {latest.name} since this import began. "
            f"Append to it by giving the command again"
        )
    needs = bytes_by_node(plan)
    owners.check_room(needs, names)
    if plan.base is None and not job.options.overwrite:
        owners.refuse_unlisted(names)
    found = find_resumable(paths, plan) if job.options.resume else None
    if found is not None:
        token, block_rows = found
    else:
        dead = measure_dead(paths, names)  # it is removed as soon as it is known that the import fits
        of_one = plan.rows.destinations[: plan.rows.partitions]
        copies = sum(len(owners.keep_here(each.owners)) for each in of_one) / plan.rows.partitions
        check_room(paths, plan.sizes, copies, plan.rows.codec, sum(dead.values()))
        check_quotas(paths, {n: needs[n] - dead.get(n, 0) for n in owners.keep_here(needs)})
        token = f"{host_mark()}-{os.getpid()}-{secrets.token_hex(4)}"
        block_rows = plan.rows.block_rows
    sweep(paths, names, kept=token)
    before = job.after or (job.catalog.find(names[0]) if job.beside_servers else None)
    rows = replace(plan.rows, token=token, block_rows=block_rows)
    return replace(plan, rows=replace(rows, earlier=find_earlier(before, rows, plan.sources[0])))


# Write: read, route and build, then publish


def _write_and_publish(job: ImportJob, plan: ImportPlan) -> list[CacheSpec]:
    """Write the staged partitions, and publish the versions that they make."""
    paths, options, names, token = job.paths, job.options, plan.rows.names, plan.rows.token
    published = False
    versions: list[CacheSpec] = []
    try:
        kept = "What was written is kept: the same command continues with it, one without --resume removes it"
        with full_disk_as_error(paths.home, kept if options.resume else "Nothing of it was kept"):
            job.owners.record_stores()
            versions += _build_in_blocks(job, plan)
            _put_in_place(job, plan, versions)
            dropped = job.catalog.publish(versions, overwrite=options.overwrite or options.append)
            published = True
            commit_manifests(paths, versions)
            record_as_verified(paths, versions, plan.first_partition)
    finally:
        for name in names:
            if published or not options.resume:
                shutil.rmtree(paths.staged(name, token).root, ignore_errors=True)
        if not published:
            remove_unpublished(job.catalog, versions)
        job.owners.end(job.catalog, token, names, versions, kept=options.resume)
    job.catalog.remove_files(dropped)
    return versions


def _build_in_blocks(job: ImportJob, plan: ImportPlan) -> list[CacheSpec]:
    """Build the staged partitions, from the beginning again with fewer rows a block if texts are too long."""
    while True:
        try:
            return _build(job, plan)
        except TextsTooLong:
            rows = plan.rows
            if plan.base is not None:
                raise SourceError(
                    f"What is appended must be like the rows of the cache, whose blocks are of "
                    f"{rows.block_rows} rows. Received: texts so much longer that a block doesn't fit into "
                    f"memory. Import all rows again with --overwrite"
                ) from None
            fewer = max(1, rows.block_rows // _FEWER_ROWS)
            plan = replace(plan, rows=replace(rows, block_rows=fewer, earlier=None))
            for name in rows.names:
                shutil.rmtree(job.paths.staged(name, rows.token).root)


def _build(job: ImportJob, plan: ImportPlan) -> list[CacheSpec]:
    """Build the staged partitions of all stores. Returns the versions that they make."""
    paths, rows, by_nodes = job.paths, plan.rows, plan.is_read_by_nodes
    make_folder(paths.home, paths.staging)
    make_folder(paths.home, paths.nodes)
    for name in rows.names:
        paths.staged(name, rows.token).root.mkdir(exist_ok=True)
    journal = ImportJournal(paths, plan) if job.options.resume else None
    router = RowRouter(rows, job.owners.take_rows(rows, by_nodes=by_nodes))
    try:
        with failures_explained():
            adopted = router.open(adopt=journal is not None)
            place = Place(0, 0, 0, 0, (0,) * len(adopted)) if journal is None else journal.find_place(adopted)
            units = _read(job, plan, router, journal, place)
            if job.skipped and not router.rows.any():
                raise DamagedImages(tuple(job.skipped))
            _refuse_empty_caches(rows, router.rows)
            finished = router.finish(units)
        return [
            _describe_version(job, plan, name, finished[first : first + rows.partitions])
            for name, first in zip(rows.names, itertools.count(0, rows.partitions), strict=False)
        ]
    finally:
        router.stop(close=job.options.resume or by_nodes)  # otherwise what ends the import does it


def _read(
    job: ImportJob, plan: ImportPlan, router: RowRouter, journal: ImportJournal | None, place: Place
) -> int:
    """Have all sources read, and their rows come to the router. Returns the number of units."""
    remote = job.owners.remote
    if remote is None or not plan.is_read_by_nodes:
        return _read_here(job, plan, router, journal, place)
    if plan.hosts is not None:
        return read_on_hosts(remote, plan, plan.hosts, plan.rows, router, job.progress)
    return _read_on_nodes(job, NodeReading(remote, plan), router, journal, place)


def _read_here(
    job: ImportJob, plan: ImportPlan, router: RowRouter, journal: ImportJournal | None, place: Place
) -> int:
    """Read all sources in this process, and give their rows to the stores."""
    rows, import_rows = place.rows, ImportRows(plan.rows)
    limit, kept = plan.options.limit, sum(place.counts)
    bytes_before = [0, *itertools.accumulate(state.size for state in plan.states)]
    owners = {owner for each in plan.rows.destinations for owner in each.owners}
    elsewhere = owners - set(job.owners.keep_here(owners))
    quotas = QuotaWatch(job.paths, job.owners.keep_here(plan.topology.nodes))
    router.begin(0, place.counts)
    job.progress(kept, place.bytes, plan.source_bytes)
    block_bytes = BLOCK_BYTES * (_TIMES_SENT if elsewhere else 1)
    blocks = SourceBlocks(plan.sources, plan.states, block_bytes, (place.source, place.start))
    with all_missing_values_named(plan.sources), blocks:
        for item in blocks:
            if limit is not None and kept >= limit:
                break
            read = item.block
            block = import_rows.prepare(plan.sources[item.source], read, plan.first_row + rows)
            if limit is not None:
                block = cut_block(block, limit - kept)
            router.append(block, import_rows.route(block, plan.first_row + rows))
            rows, kept = rows + read.rows, kept + block.rows
            bytes_done = bytes_before[item.source] + read.source_bytes
            job.progress(kept, bytes_done, plan.source_bytes)
            quotas.check(bytes_done)
            if journal is not None:
                journal.note(item.source, read.next_start, rows, bytes_done, router.rows)
    # Some may be read twice, such as to measure texts.
    job.skipped[:] = dict.fromkeys(problem for source in plan.sources for problem in skipped_of(source))
    return 1


def _read_on_nodes(
    job: ImportJob, reading: NodeReading, router: RowRouter, journal: ImportJournal | None, place: Place
) -> int:
    """Have nodes read all sources, and send their rows to the stores."""
    done, total = place.bytes, reading.source_bytes

    def count(size: int) -> None:
        nonlocal done
        done += size
        job.progress(int(router.rows.sum()), min(done, total), total)

    reading.number_rows()
    router.begin(place.source, place.counts)
    job.progress(sum(place.counts), place.bytes, total)
    reading.read(place, journal, router.record_rows, count)
    job.skipped[:] = reading.skipped
    job.progress(int(router.rows.sum()), total, total)
    return len(reading.units)


def _refuse_empty_caches(plan: RowPlan, found: npt.NDArray[np.int64]) -> None:
    rows = int(found.sum())
    per_name = found.reshape(len(plan.names), -1).sum(axis=1)
    for name, count in zip(plan.names, per_name, strict=True):
        if not count:
            remedy = "Keep more of them: --where, --drop-nulls and --sample leave out rows"
            if len(plan.names) > 1 and rows:
                remedy = "Give its part of the split a larger fraction"
            raise SourceError(
                f"{name} would have none of the {format_count(rows, 'row')} that are kept. {remedy}"
            )


def _describe_version(job: ImportJob, plan: ImportPlan, name: str, own: Sequence[Finished]) -> CacheSpec:
    """Return the new version of one of the caches, whose partitions are complete."""
    rows = plan.rows
    infos = [] if plan.base is None else list(plan.base.partitions)
    for to, each in zip((to for to in rows.destinations if to.cache == name), own, strict=True):
        info = PartitionInfo(to.partition, each.rows, each.bytes, each.checksum, to.owners, each.raw_bytes)
        infos.append(info)
    sizes = np.array([each.column_bytes for each in own], dtype=np.int64).sum(axis=0)
    return CacheSpec(
        name,
        job.owners.choose_version(job.catalog, name),
        rows.columns,
        tuple(infos),
        plan.backups,
        rows.key,
        time.time(),
        rows.labels,
        rows.block_rows,
        rows.codec,
        plan.sum_column_bytes([(int(raw), int(stored)) for raw, stored in sizes]),
        describe_origin(plan),
        job.options.version_note or "",
    )


def _put_in_place(job: ImportJob, plan: ImportPlan, versions: Sequence[CacheSpec]) -> None:
    """Put the staged partitions into the stores, where nobody reads them yet."""
    check_quotas(job.paths, dict.fromkeys(job.owners.keep_here(plan.topology.nodes), 0))
    for cache in versions:
        job.owners.put_in_place(plan.rows.token, cache, plan.base)


def check_names(paths: Paths, options: ImportOptions) -> None:
    """Raise what `run_import` raises for the name of a cache, before it reads anything."""
    catalog = Catalog(paths, of_one_head=True)
    names, _ = _names_and_fractions(options)
    if options.append:
        catalog.get(options.cache)
    else:
        _refuse_existing(catalog, names, options.overwrite)
