"""Removes from the store of an agent what nobody needs any more, by the catalogue of its home.

An agent's copy of that may be old. But a version that was replaced or deleted in it stays so, and its number
is never used again.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.catalog_copy import is_catalog_copy
from insitu.grid.catalog.manifests import StoredVersion, find_versions, manifest_lock, remove_from_manifest

logger = logging.getLogger("insitu")
FETCHED_SECONDS = 60.0
"""Seconds for which a copy that was fetched for a job stays at least: the job's pin may not be known here."""


def tidy_store(paths: Paths, node: NodeId) -> list[tuple[str, int]]:
    """Remove versions that were replaced or deleted, and copies that were fetched for jobs that have ended.

    Returns (cache, version) of what was removed. Does nothing if the catalogue isn't that of a cluster.
    """
    if not (is_catalog_copy(paths) or paths.head.exists()):
        return []
    catalog = Catalog(paths)
    stored = {(cache.name, cache.version): cache for cache in catalog.stored()}
    latest: dict[str, int] = {}
    for name, version in stored:
        latest[name] = max(version, latest.get(name, 0))
    deleted = catalog.deleted()
    removed = []
    for place in find_versions(paths):
        if place.node != node:
            continue
        cache = stored.get((place.name, place.version))
        if cache is not None:
            _remove_fetched(paths, catalog, place, cache)
        elif place.version < latest.get(place.name, 0) or place.version <= deleted.get(place.name, 0):
            shutil.rmtree(place.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                place.folder.parent.rmdir()
            removed.append((place.name, place.version))
            logger.info("removed %s version %d, which was replaced or deleted", place.name, place.version)
    return removed


def _remove_fetched(paths: Paths, catalog: Catalog, place: StoredVersion, cache: CacheSpec) -> None:
    """Remove the copies that jobs have had fetched, if no job uses the version any more."""
    for info in cache.partitions:
        key = (place.node, place.name, place.version, info.index)
        mark = paths.fetched(*key)
        if not mark.exists():
            continue
        if place.node in info.owners:
            mark.unlink(missing_ok=True)  # the catalogue places it here now
        elif not catalog.pinned_by(place.name, place.version):
            with manifest_lock(place.folder):
                if not _is_old(mark):
                    continue
                for path in (paths.partition(*key), paths.verified(*key), mark):
                    path.unlink(missing_ok=True)
            remove_from_manifest(paths, *key)
            logger.info("removed partition %d of %s, fetched for a job", info.index, place.name)


def _is_old(mark: Path) -> bool:
    try:
        return time.time() - mark.stat().st_mtime > FETCHED_SECONDS
    except OSError:
        return False
