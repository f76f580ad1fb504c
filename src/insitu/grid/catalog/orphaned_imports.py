"""Finds the leftovers of imports that died, spares those that are alive, and removes them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.base.disk.access import make_folder
from insitu.base.disk.guarded_paths import list_folders, open_folder
from insitu.base.errors import CacheBusy, InputError
from insitu.base.paths import Paths, StagedPaths, cache_name_of_folder
from insitu.base.process.processes import ProcessIdentity, has_ended, identify_process, read_host
from insitu.base.spec import NodeId
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.catalog_copy import is_catalog_copy
from insitu.grid.catalog.files import cache_locks
from insitu.grid.catalog.manifests import is_leftover
from insitu.grid.catalog.store_identity import is_home_of_agent


@dataclass(frozen=True, slots=True)
class StagedImport:
    """Data in a store of an import that hasn't been ended there."""

    #: The cache.
    cache: str
    #: Identifies the import.
    token: str
    #: The version that has its place in the store already; None: there is none.
    version: int | None


def sweep(paths: Paths, locked: Sequence[str] = (), *, kept: str | None = None) -> int:
    """Remove what dead imports left: staging, and version folders that the catalogue doesn't know.

    Leaves alone what belongs to an import that is alive. `locked` are caches that the caller has locked;
    others are locked for the instant that it takes to rename what is dead. Data that can be continued with
    --resume is removed for `locked` caches only, unless its token is `kept`. Returns the bytes removed.

    Removes nothing in the home of an agent: only the head knows which imports have ended.
    """
    if is_catalog_copy(paths) or is_home_of_agent(paths):
        return 0
    caches = {
        cache_name_of_folder(store.name)
        for node in _folders(paths, paths.nodes)
        for store in _folders(paths, node)
    }
    caches |= {cache_name_of_folder(folder.name) for folder in _folders(paths, paths.staging)}
    for cache in sorted(caches - {""}):
        spared = (kept,) if cache in locked else _resumable(paths, cache)
        if not _dead_folders(paths, cache, spared):
            continue
        with contextlib.suppress(CacheBusy, InputError), contextlib.ExitStack() as stack:
            if cache not in locked:
                stack.enter_context(cache_locks(paths, [cache]))
            make_folder(paths.home, paths.staging)
            for folder in _dead_folders(paths, cache, spared):
                with open_folder(paths.home, folder.parent, follow=True) as opened:
                    (opened / folder.name).rename(paths.trash(secrets.token_hex(8)))
    removed = 0
    for folder in _folders(paths, paths.staging):
        if not cache_name_of_folder(folder.name) and not _is_scratch(folder):
            removed += sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _resumable(paths: Paths, cache: str) -> tuple[str, ...]:
    """Return the tokens of dead or living imports into `cache` that --resume continues."""
    folders = [f for f in _folders(paths, paths.staging) if cache_name_of_folder(f.name) == cache]
    tokens = [folder.name.partition("~")[2] for folder in folders]
    return tuple(token for token in tokens if paths.staged(cache, token).journal.exists())


def list_resumable(paths: Paths) -> dict[str, int]:
    """Return the bytes that imports which were interrupted keep for --resume, by the name of the cache."""
    found: dict[str, int] = {}
    for folder in _folders(paths, paths.staging):
        cache, token = cache_name_of_folder(folder.name), folder.name.partition("~")[2]
        if not cache or not paths.staged(cache, token).journal.exists():
            continue
        with contextlib.suppress(CacheBusy, InputError), cache_locks(paths, [cache]):
            size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
            found[cache] = found.get(cache, 0) + size
    return found


def measure_dead(paths: Paths, locked: Sequence[str]) -> dict[NodeId, int]:
    """Return the bytes by node that `sweep` will free of caches that the caller has locked, if it keeps
    nothing. Files that have further names aren't freed."""
    freed: dict[NodeId, int] = {}
    if is_catalog_copy(paths):
        return freed
    for folder in (folder for cache in locked for folder in _dead_folders(paths, cache, ())):
        stores = folder / "stores" if folder.parent == paths.staging else paths.nodes
        for path in (stores if folder.parent == paths.staging else folder).rglob("*"):
            with contextlib.suppress(OSError):
                found, node = path.lstat(), NodeId(path.relative_to(stores).parts[0])
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                    freed[node] = freed.get(node, 0) + found.st_size
    return freed


def _dead_folders(paths: Paths, cache: str, spared: Sequence[str | None]) -> list[Path]:
    """Return the folders that dead imports into `cache` left, provided that nobody imports into it now."""
    stored = [spec for spec in Catalog(paths).stored() if spec.name == cache]
    staged = [
        f
        for f in _folders(paths, paths.staging)
        if cache_name_of_folder(f.name) == cache
        and f.name.partition("~")[2] not in spared
        and not is_of_another_host(f)
    ]
    stores = [
        s
        for node in _folders(paths, paths.nodes)
        for s in _folders(paths, node)
        if cache_name_of_folder(s.name) == cache
    ]
    versions = (version for store in stores for version in _folders(paths, store))
    return [*staged, *(version for version in versions if is_leftover(paths, version, stored))]


def host_mark() -> str:
    """Return the beginning of the names of folders in staging that imports of this host make."""
    return f"{zlib.crc32(read_host().encode()):08x}"


def is_of_another_host(staged: Path) -> bool:
    """Return whether an import of another host made the folder: its lock may not be seen here."""
    mark, dash, _ = staged.name.partition("~")[2].partition("-")
    return bool(dash) and len(mark) == 8 and mark != host_mark()


@contextlib.contextmanager
def scratch_folder(paths: Paths) -> Iterator[Path]:
    """Yield a new folder on the disk of the home. It is removed at the end, or by `sweep` once this process
    has died."""
    me = identify_process(os.getpid())
    make_folder(paths.home, paths.staging)
    folder = paths.trash(f"{host_mark()}-{os.getpid()}-{me.start if me else 0}-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_scratch(folder: Path) -> bool:
    """Return whether a process that may be alive works in a folder that `scratch_folder` has made."""
    parts = folder.name.removeprefix("~").split("-")
    if len(parts) != 4 or is_of_another_host(folder):
        return len(parts) == 4
    return not has_ended(ProcessIdentity(int(parts[1]), int(parts[2])))


def _folders(paths: Paths, parent: Path) -> list[Path]:
    """Return the folders in a folder of the home, without what others' links lead to: that isn't insitu's."""
    return list_folders(paths.home, parent)


def list_staged_imports(paths: Paths) -> list[StagedImport]:
    """Return the imports that have brought something to this home and weren't ended."""
    found = []
    for folder in sorted(_folders(paths, paths.staging)):
        cache, token = cache_name_of_folder(folder.name), folder.name.partition("~")[2]
        if cache and token:
            found.append(StagedImport(cache, token, read_prepared(StagedPaths(folder))))
    return found


def find_ended_imports(paths: Paths, staged: Sequence[StagedImport]) -> list[tuple[StagedImport, bool]]:
    """Return which of the imports that an agent has named have ended, and whether each was published.

    `paths` is the home of the head, in which imports run and hold the lock on their caches. A token is drawn
    under that lock: so if the lock is free, the import that has drawn it is over for good. Raises GridError
    if the catalogue can't be read.
    """
    ended = []
    for each in staged:
        if is_of_another_host(Path(f"~{each.token}")) and not paths.fence.exists():
            continue  # its lock may not be seen here, unless etcd lets that host publish nothing any more
        with contextlib.suppress(CacheBusy), cache_locks(paths, [each.cache], seconds=0.0):
            known = each.version is not None and Catalog(paths).find(each.cache, each.version) is not None
            if not known and paths.staged(each.cache, each.token).journal.exists():
                continue  # --resume continues it
            ended.append((each, known))
    return ended


def read_prepared(staged: StagedPaths) -> int | None:
    """Return the version that the partitions of an import have become; None: they are staged, or partly."""
    try:
        return int(staged.prepared.read_text())
    except (OSError, ValueError):
        return None
