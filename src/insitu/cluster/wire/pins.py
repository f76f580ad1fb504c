"""Releases what jobs keep of caches, where another head may lead by the time that a job ends."""

from __future__ import annotations

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.grid import Catalog, is_in_etcd

_ASK_SECONDS = 10.0


def release_pins(paths: Paths, job_id: str) -> None:
    """Let the versions go that a job of this home has used, in the catalogue of the head that leads. Raises
    GridError, ClusterError."""
    try:
        Catalog(paths).unpin(job_id)
    except GridError:
        if not is_in_etcd(paths):
            raise
        # Not above: a job of one machine needs no messages.
        from insitu.cluster.wire import ask_head, find_head, read_token

        ask_head(find_head(paths), read_token(paths), {"do": "unpin", "job": job_id}, _ASK_SECONDS)


def list_jobs_elsewhere(paths: Paths, cache: str | None = None) -> list[str]:
    """Return the jobs that use a cache (None: any) and were started in the homes of other heads. Whether they
    run isn't known here."""
    if not is_in_etcd(paths):
        return []
    catalog = Catalog(paths)
    caches = {spec.name for spec in catalog.stored()} if cache is None else {cache}
    jobs = {job for name in caches for job in catalog.pinned_by(name)}
    return sorted(job for job in jobs if not paths.job(job).spec.exists())
