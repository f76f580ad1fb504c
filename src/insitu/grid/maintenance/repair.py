"""`insitu repair`: makes the catalogue and the stores agree again.

The stores at hand are looked through. Entries that their manifests have and the catalogue lacks are put back
into the catalogue; a manifest that is missing, damaged or not yet marked is written again. No version is
removed: a catalogue that can't be read is kept under another name. A copy counts if its file has the right
size and, if its manifest can't be trusted, the right checksum.

A version that was complete but never published is left out: it may be one that the user has given up. So is
one of which partitions are missing; their nodes may come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.base.disk.access import file_mode
from insitu.base.disk.durable import sync_folder
from insitu.base.disk.guarded_paths import open_folder
from insitu.base.errors import (
    CorruptCatalog,
    CorruptManifest,
    CorruptPartition,
    GridError,
    InsituError,
    StorageFull,
)
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, PartitionInfo
from insitu.base.wording import format_count, inflect
from insitu.grid.catalog import (
    SCHEMA_VERSION,
    Catalog,
    Manifest,
    StoredVersion,
    cache_locks,
    check_distinct,
    find_versions,
    full_disk_as_error,
    home_errors,
    list_nodes_with_stores,
    make_store_id,
    publish_file,
    read_manifest,
    read_schema_version,
    read_store_id,
    refuse_copy,
    update_stores,
    write_manifest,
)
from insitu.grid.importing import link_file
from insitu.grid.partitions import check_size, make_corrupt_error, verify_file
from insitu.grid.replicas import find_second_paths, load_topology, put_copy
from insitu.grid.stores import check_quota, read_settings, write_settings

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores


Progress = Callable[[int, int], None]
"""Called with (folders of versions that were looked at, all of them)."""


@dataclass(slots=True)
class RepairReport:
    """Findings and actions of `repair_catalog`, done or planned."""

    #: The path to which an unreadable catalogue was put, or would be; None: it can be read, or there is none.
    set_aside: Path | None = None
    #: Versions that were put back into the catalogue.
    restored: list[CacheSpec] = field(default_factory=list)
    #: Versions that the catalogue has had all along.
    known: list[CacheSpec] = field(default_factory=list)
    #: (cache, version) of versions that are complete but were never published, and were left out.
    unpublished: list[tuple[str, int]] = field(default_factory=list)
    #: (cache, version, why) of versions that can't be put back.
    incomplete: list[tuple[str, int, str]] = field(default_factory=list)
    #: (cache, version) of versions that an import has replaced, whose files are leftovers.
    replaced: list[tuple[str, int]] = field(default_factory=list)
    #: Manifests that were written again or marked as published.
    manifests_written: list[Path] = field(default_factory=list)
    #: Untrusted things that were passed over: manifests, ids of stores, copies.
    problems: list[str] = field(default_factory=list)
    #: Stores that got their id back.
    stores_identified: list[NodeId] = field(default_factory=list)
    #: Nodes that were put back into the list of nodes; empty if it was right.
    nodes_listed: list[NodeId] = field(default_factory=list)
    #: How many partitions came back from the second paths of stores, and how many stay there, by node.
    brought_back: dict[NodeId, tuple[int, int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything that was published is in the catalogue now, and in the stores."""
        return not self.incomplete and not any(left for _, left in self.brought_back.values())


@dataclass(frozen=True, slots=True)
class _Folder:
    """One folder of a version, with what its manifest says."""

    #: Its place.
    place: StoredVersion
    #: Its manifest; None if that can't be trusted.
    manifest: Manifest | None
    #: Whether the manifest names its own store.
    at_home: bool
    #: For a store on another host, the partitions that its agent has found with the right size; None: it is
    #: in this home.
    held: tuple[int, ...] | None = None


def repair_catalog(
    paths: Paths,
    *,
    dry_run: bool = False,
    with_unpublished: bool = False,
    progress: Progress | None = None,
    remote: RemoteStores | None = None,
) -> RepairReport:
    """Rebuild what the catalogue lacks from the stores at hand; with `dry_run` only say what would be done.

    `with_unpublished` publishes complete versions whose import died before it did. `remote` are agents whose
    stores are looked through, too. Raises CacheBusy during an import, GridError if one store is a copy of
    another, CorruptCatalog for a catalogue of a newer insitu, which is left as it is, TransferError if an
    agent is lost. An agent's copy isn't repaired: GridError.
    """
    if not dry_run:
        refuse_copy(paths)
    report = RepairReport()
    with home_errors(paths.home), full_disk_as_error(paths.home):
        stored = _read_catalog(paths, report)
        places = find_versions(paths)
        elsewhere = [] if remote is None else read_remote_folders(paths, remote, report)
        names = sorted({place.name for place in (*places, *(folder.place for folder in elsewhere))})
        with contextlib.nullcontext() if dry_run else cache_locks(paths, names):
            stores = _identify_stores(paths, places, report, dry_run)
            folders = _read_folders(paths, places, stores, report, progress or (lambda done, total: None))
            folders += elsewhere
            chosen = _choose_versions(folders, stored, with_unpublished, report)
            if remote is not None:
                folders = _recount(remote, folders, chosen, report, dry_run)
            copies = _find_copies(paths, folders, chosen, report)
            _keep_complete(chosen, copies, stored, report)
            if not dry_run:
                if report.set_aside is not None:
                    _set_aside(paths, report.set_aside)
                if report.restored:
                    Catalog(paths).restore(report.restored)
            _write_manifests(paths, copies, stores, folders, report, dry_run)
            _list_nodes(paths, report, dry_run, () if remote is None else (*remote.nodes, *remote.here))
            if not dry_run:
                update_stores(paths, (), make_catalog=bool(report.restored))
                if remote is not None and paths.catalog.exists():
                    found = {survey.store: node for node, survey in remote.survey(()).items()}
                    Catalog(paths).record_stores(found, {})
            _bring_back(paths, folders, chosen, report, dry_run)
    return report


def _read_catalog(paths: Paths, report: RepairReport) -> list[CacheSpec]:
    try:
        return Catalog(paths).stored()
    except CorruptCatalog:
        with (
            contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError),
            _opened(paths.catalog) as database,
        ):
            if read_schema_version(database) > SCHEMA_VERSION:
                raise
        report.set_aside = paths.catalog.with_name(f"{paths.catalog.name}.damaged-{time.time_ns() // 10**9}")
        return []


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        yield database


def _set_aside(paths: Paths, target: Path) -> None:
    journal = paths.catalog_journal
    with contextlib.suppress(FileNotFoundError):
        journal.rename(target.with_name(f"{target.name}-journal"))
    os.rename(paths.catalog, target)


def _identify_stores(
    paths: Paths, places: Sequence[StoredVersion], report: RepairReport, dry_run: bool
) -> dict[NodeId, str]:
    """Return the id of each store. One that is missing or damaged is taken from the store's manifests."""
    stores = {}
    for node in list_nodes_with_stores(paths):
        store = None
        try:
            store = read_store_id(paths, node)
        except GridError as error:
            report.problems.append(str(error))
            if not dry_run:
                paths.store_id(node).unlink(missing_ok=True)
        if store is None and (store := _find_named_store(places, node)) is not None:
            report.stores_identified.append(node)
            if not dry_run:
                make_store_id(paths, node, store)
        if store is not None:
            stores[node] = store
    check_distinct(paths, stores)
    return stores


def _find_named_store(places: Sequence[StoredVersion], node: NodeId) -> str | None:
    """Return the store that all readable manifests on `node` name; None if there is none, or several."""
    named = set()
    for place in places:
        with contextlib.suppress(CorruptManifest):
            if place.node == node:
                named.add(read_manifest(place.manifest).store)
    return named.pop() if len(named) == 1 else None


def _read_folders(
    paths: Paths,
    places: Sequence[StoredVersion],
    stores: dict[NodeId, str],
    report: RepairReport,
    progress: Progress,
) -> list[_Folder]:
    folders = []
    for number, place in enumerate(places):
        progress(number, len(places))
        manifest = None
        try:
            manifest = read_manifest(place.manifest)
            if (manifest.cache.name, manifest.cache.version) != (place.name, place.version):
                raise CorruptManifest(
                    f"{place.manifest} is of {manifest.cache.name} version {manifest.cache.version}"
                )
        except CorruptManifest as error:
            manifest = None
            report.problems.append(str(error))
        at_home = manifest is not None and stores.get(place.node) in (None, manifest.store)
        if manifest is not None and not at_home:
            report.problems.append(
                f"{place.manifest} names the store {manifest.store}, but is in {stores[place.node]}"
            )
        folders.append(_Folder(place, manifest, at_home))
    progress(len(places), len(places))
    return folders


def read_remote_folders(paths: Paths, remote: RemoteStores, report: RepairReport) -> list[_Folder]:
    """Return what agents say about their stores. Copies that were fetched for jobs don't count. Raises
    TransferError."""
    folders = []
    for node, survey in sorted(remote.survey(()).items()):
        for name, version in remote.list_versions(node):
            place = StoredVersion(node, name, version, paths.version(node, name, version))
            found = remote.read_manifest(node, name, version)
            try:
                if "problem" in found:
                    raise ValueError(found["problem"])
                manifest = Manifest.from_json(found["manifest"])
                if (manifest.cache.name, manifest.cache.version, manifest.store) != (
                    name,
                    version,
                    survey.store,
                ):
                    raise ValueError("its manifest is of another version or store")
                held = tuple(sorted(set(found["held"]) - set(found["fetched"])))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                report.problems.append(f"{name} version {version} on {node}: {error}")
                folders.append(_Folder(place, None, False, ()))
                continue
            folders.append(_Folder(place, manifest, True, held))
    return folders


def _recount(
    remote: RemoteStores,
    folders: Sequence[_Folder],
    chosen: dict[tuple[str, int], CacheSpec],
    report: RepairReport,
    dry_run: bool,
) -> list[_Folder]:
    """Have agents verify copies beside manifests that can't be trusted, and write these again. Raises
    TransferError."""
    counted = []
    for folder in folders:
        place = folder.place
        cache = chosen.get((place.name, place.version))
        if cache is not None and folder.held is not None and folder.manifest is None:
            held, problems = remote.recount(place.node, cache, write=not dry_run)
            report.problems += problems
            report.manifests_written.append(place.manifest)
            folder = replace(folder, held=held)
        counted.append(folder)
    return counted


def _choose_versions(
    folders: Sequence[_Folder], stored: Sequence[CacheSpec], with_unpublished: bool, report: RepairReport
) -> dict[tuple[str, int], CacheSpec]:
    """Return the versions that the catalogue has or gets, if their partitions are all there."""
    chosen = {(cache.name, cache.version): cache for cache in stored}
    latest: dict[str, int] = defaultdict(int)
    for cache in stored:
        latest[cache.name] = max(latest[cache.name], cache.version)
    by_version = defaultdict(list)
    for folder in folders:
        by_version[folder.place.name, folder.place.version].append(folder)
    for (name, version), group in sorted(by_version.items()):
        manifests = [folder.manifest for folder in group if folder.manifest is not None]
        if (name, version) in chosen:
            continue
        if version < latest[name]:
            report.replaced.append((name, version))
        elif not manifests:
            report.incomplete.append((name, version, "none of its manifests can be read"))
        elif any(not _same_data(manifest.cache, manifests[0].cache) for manifest in manifests):
            report.incomplete.append((name, version, "its manifests describe different versions"))
        elif with_unpublished or any(manifest.state == "committed" for manifest in manifests):
            chosen[name, version] = manifests[0].cache
        else:
            report.unpublished.append((name, version))
    return chosen


def _same_data(one: CacheSpec, other: CacheSpec) -> bool:
    """Return whether two specifications describe the same version, with any owners."""

    def without_owners(cache: CacheSpec) -> CacheSpec:
        nobody = (NodeId("-"),)
        return replace(cache, partitions=tuple(replace(p, owners=nobody) for p in cache.partitions))

    return without_owners(one) == without_owners(other)


def _find_copies(
    paths: Paths,
    folders: Sequence[_Folder],
    chosen: dict[tuple[str, int], CacheSpec],
    report: RepairReport,
) -> dict[tuple[str, int], dict[NodeId, tuple[int, ...]]]:
    """Return the partitions of each chosen version that each node has a good copy of."""
    copies: dict[tuple[str, int], dict[NodeId, tuple[int, ...]]] = defaultdict(dict)
    for folder in folders:
        place = folder.place
        cache = chosen.get((place.name, place.version))
        if cache is None:
            continue
        if folder.held is not None:
            copies[place.name, place.version][place.node] = folder.held
            continue
        trusted = folder.at_home and folder.manifest is not None and _same_data(folder.manifest.cache, cache)
        expected = folder.manifest.held if trusted and folder.manifest else range(len(cache.partitions))
        held = []
        for index in expected:
            path = paths.partition(place.node, place.name, place.version, index)
            if not trusted and not path.exists():
                continue
            problem = _check_copy(paths, place, cache.partitions[index], trusted)
            if problem is None:
                held.append(index)
            else:
                report.problems.append(problem)
        copies[place.name, place.version][place.node] = tuple(held)
    return copies


def _check_copy(paths: Paths, place: StoredVersion, info: PartitionInfo, trusted: bool) -> str | None:
    """Return what is wrong with a copy, or None."""
    key = (place.node, place.name, place.version, info.index)
    try:
        if trusted:
            check_size(paths.partition(*key), info)
        else:
            verify_file(paths.partition(*key), info, paths.verified(*key))
    except CorruptPartition as error:
        return str(error)
    return None


def _keep_complete(
    chosen: dict[tuple[str, int], CacheSpec],
    copies: dict[tuple[str, int], dict[NodeId, tuple[int, ...]]],
    stored: Sequence[CacheSpec],
    report: RepairReport,
) -> None:
    """Put into the report which versions are restored, with the owners that have good copies."""
    report.known = list(stored)
    known = {(cache.name, cache.version) for cache in stored}
    for key, cache in sorted(chosen.items()):
        holders = copies[key]
        partitions, missing = [], []
        for info in cache.partitions:
            owners = sorted((node for node, held in holders.items() if info.index in held), key=_order(info))
            if owners:
                partitions.append(replace(info, owners=tuple(owners)))
            else:
                missing.append(info.index)
        if missing:
            some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            report.incomplete.append(
                (
                    *key,
                    f"{format_count(len(missing), 'partition')} {inflect(len(missing), 'is', 'are')} "
                    f"missing: {some}",
                )
            )
        elif key not in known:
            report.restored.append(replace(cache, partitions=tuple(partitions)))


def _order(info: PartitionInfo) -> Callable[[NodeId], tuple[int, NodeId]]:
    """Return the order of owners: as they were when the version was published, then by name."""
    return lambda node: (info.owners.index(node) if node in info.owners else len(info.owners), node)


def _write_manifests(
    paths: Paths,
    copies: dict[tuple[str, int], dict[NodeId, tuple[int, ...]]],
    stores: dict[NodeId, str],
    folders: Sequence[_Folder],
    report: RepairReport,
    dry_run: bool,
) -> None:
    """Write the manifests that are missing, wrong or not marked, of versions that the catalogue has."""
    present = {(cache.name, cache.version): cache for cache in (*report.known, *report.restored)}
    for folder in folders:
        place = folder.place
        cache = present.get((place.name, place.version))
        if cache is None or folder.held is not None:
            continue  # an agent marks its manifests when the head has the version
        held = copies[place.name, place.version].get(place.node, ())
        old = folder.manifest
        if old is not None and folder.at_home and (old.state, old.held) == ("committed", held):
            continue
        report.manifests_written.append(place.manifest)
        if not dry_run:
            store = stores.get(place.node) or make_store_id(paths, place.node)
            spec = cache if old is None else old.cache
            write_manifest(paths.home, place.manifest, Manifest(spec, store, held, "committed"))


def _bring_back(
    paths: Paths,
    folders: Sequence[_Folder],
    chosen: dict[tuple[str, int], CacheSpec],
    report: RepairReport,
    dry_run: bool,
) -> None:
    """Bring back what an earlier version has moved to second paths, versions that are left out included."""
    caches: dict[NodeId, list[CacheSpec]] = defaultdict(list)
    for folder in folders:
        cache = chosen.get((folder.place.name, folder.place.version))
        if cache is None and folder.manifest is not None:
            cache = folder.manifest.cache
        if cache is not None:
            caches[folder.place.node].append(cache)
    for node, root in find_second_paths(paths).items():
        if dry_run:
            report.brought_back[node] = len(find_links(paths, node, root)), 0
        else:
            report.brought_back[node] = bring_back(paths, node, root, caches[node], report.problems)


def _list_nodes(paths: Paths, report: RepairReport, dry_run: bool, agents: Sequence[NodeId]) -> None:
    """Write the list of nodes again if it is lost or lacks owners. Nodes with agents aren't in it."""
    try:
        listed = set(load_topology(paths).nodes)
    except GridError as error:
        report.problems.append(str(error))
        listed = set()
    owners = {node for cache in report.restored for p in cache.partitions for node in p.owners} - {*agents}
    if listed and owners <= listed:
        return
    nodes = sorted((listed | owners | set(list_nodes_with_stores(paths))) - set(agents))
    report.nodes_listed = nodes
    if nodes and not dry_run:
        publish_file(paths.topology, json.dumps({"nodes": nodes}).encode(), file_mode(paths.home))


# Partitions that an earlier version has moved to a second path of their store, such as a slower disk.
#
# In the store a link takes the place of the file, so that readers find it by the same name. Nothing is moved
# there any more: `insitu repair` brings back what is there.
#
# Members of a shared home may make links, too. A link counts here if it leads to the one place on the second
# path that belongs to the partition. Copies there aren't trusted until their checksum is right


Moved = dict[tuple[int, int, str], Path]
"""Paths to which files of several versions have been moved, by their device, inode and checksum."""


def find_links(paths: Paths, node: NodeId, root: Path) -> list[Path]:
    """Return the links in a store that lead to somewhere below `root`."""
    found = []
    for folder, _, names in os.walk(paths.node(node)):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):  # most aren't links
                if Path(os.readlink(path)).is_relative_to(root):
                    found.append(path)
    return sorted(found)


def bring_back(
    paths: Paths, node: NodeId, root: Path, caches: Iterable[CacheSpec], problems: list[str]
) -> tuple[int, int]:
    """Move the partitions of `caches` in `root`, on the second path of a store, into the store.

    The caller holds the locks on the caches. Returns how many have moved, and how many stay whole in `root`;
    `problems` gets why. If no link leads to `root` any more, it is removed with all that caches which were
    deleted have left there, and the store's settings forget it.
    """
    infos = {paths.partition(node, c.name, c.version, p.index): p for c in caches for p in c.partitions}
    owned = [path for path, info in infos.items() if node in info.owners]
    links = [path for path in find_links(paths, node, root) if path in infos]
    moved: Moved = {}
    done = 0
    try:
        if links:
            _check_room(paths, node, root, links)
        for path in links:
            place = root / path.relative_to(paths.node(node))
            try:
                _move(paths, root, path, place, infos[path], moved)
                done += 1
            except StorageFull:
                raise
            except (GridError, OSError) as error:
                problems.append(f"{path} isn't brought back from {place}: {error}")
        # The last copy of a partition that is lost in the store may be there.
        if not find_links(paths, node, root) and all(path.exists() for path in owned):
            shutil.rmtree(root, ignore_errors=True)
            write_settings(paths, node, replace(read_settings(paths, node), second_path=None))
    except InsituError as error:
        problems.append(str(error))
    return done, len(find_links(paths, node, root))


def _check_room(paths: Paths, node: NodeId, root: Path, links: Sequence[Path]) -> None:
    """Raise GridError if the second path isn't there, StorageFull if the quota is too small for its content.
    A file that versions share counts once."""
    if not root.is_dir():
        raise GridError(
            f"The second path of a store must be there. Received: {root} of {node}, which isn't, for "
            f"{format_count(len(links), 'partition')}. Mount its disk, or put copies from backups into the "
            f"store with `insitu scrub --repair`"
        )
    sizes: dict[tuple[int, int], int] = {}
    for path in links:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            sizes[found.st_dev, found.st_ino] = found.st_size
    check_quota(paths, node, sum(sizes.values()))


def _move(paths: Paths, root: Path, path: Path, place: Path, info: PartitionInfo, moved: Moved) -> None:
    """Put the file at `place`, on a second path, in the place of the link at `path`, and remove it there.

    Raises CorruptPartition, GridError, StorageFull, OSError: the file is still there then.
    """
    if Path(os.readlink(path)) != place:
        raise make_corrupt_error(path, f"it doesn't lead to its place on the second path, {place}")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open_folder(root.parent, place.parent) as folder:
        with open(os.open(folder / place.name, flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size != info.bytes:
                raise make_corrupt_error(place, f"it isn't a file of {info.bytes} bytes")
            key = found.st_dev, found.st_ino, info.checksum
            if key in moved:  # one that versions share
                with open_folder(paths.home, path.parent, follow=True) as store:
                    link_file(moved[key], store / path.name)
            elif not put_copy(paths, file, path, info):
                raise make_corrupt_error(place, f"its checksum isn't {info.checksum}")
        sync_folder(path.parent)
        with contextlib.suppress(OSError):  # it goes with the folder
            (folder / place.name).unlink()
    moved[key] = path
