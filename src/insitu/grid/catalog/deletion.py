"""Deletes one cache: its versions leave the catalogue by one transaction, then their files are removed."""

from __future__ import annotations

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.catalog_copy import refuse_copy
from insitu.grid.catalog.files import cache_locks
from insitu.grid.catalog.manifests import commit_manifests, withdraw_manifests


def delete_cache(paths: Paths, name: str) -> int:
    """Delete all versions of a cache. Returns the bytes of its partitions, each copy counted.

    A process that has the cache open continues to read it: its files go when it ends. Should this process be
    killed, the cache either stands as it was, or the next import or `insitu caches` removes what is left.
    Raises UnknownCache, InputError if a job uses it, CacheBusy while something is imported into it, GridError
    in the home of an agent.
    """
    refuse_copy(paths)
    catalog = Catalog(paths)
    with cache_locks(paths, [name]):
        catalog.get(name)
        _check_unused(catalog, name)
        versions = [spec for spec in catalog.stored() if spec.name == name]
        # A version with such manifests is one that never was published, once the catalogue lacks it.
        withdraw_manifests(paths, versions)
        try:
            catalog.delete(name)
        except BaseException:
            commit_manifests(paths, versions)
            raise
        catalog.remove_files(versions)
    return sum(p.bytes * len(p.owners) for spec in versions for p in spec.partitions)


def _check_unused(catalog: Catalog, name: str) -> None:
    jobs = catalog.pinned_by(name)
    if jobs:
        raise InputError(
            f"A cache that a job uses can't be deleted. Received: {name}, used by {', '.join(jobs)}. Stop "
            f"{'it' if len(jobs) == 1 else 'them'} with `insitu stop JOB_ID` first"
        )
