"""Opens a cache as a dataset of this task's shards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

from insitu.base.context import Context
from insitu.base.context import context as context_of_process
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, split_version
from insitu.base.wording import suggest_name
from insitu.grid.caches.refreshing import EpochVersions
from insitu.grid.catalog import check_here
from insitu.grid.reading import READS, ROW, CacheReader, Dataset, resolve


def dataset(
    name: str | None = None,
    *,
    features: str | Sequence[str] | None = None,
    label: str | None = "label",
    shards: Sequence[int] | None = None,
    paths: Paths | None = None,
    context: Context | None = None,
    **columns: str | Sequence[str],
) -> Dataset:
    """Return the rows of cache `name`, by default of the job's cache, for this task's shards.

    A batch is `(features, label)` if the cache has column `label`, else `features`; features are one array
    for one column, a dict of arrays by column's name for several. `features` names the columns; None: all but
    the label. The feature "row" is the number of each row in the version, int64, by which
    `insitu.predict_into` names it, unless the cache has a column of that name. `shards` overrides which
    shards this task iterates. In the evaluator there is one shard with all partitions, of the job's version;
    so there is outside a job, of the latest version.

    `name` may name a version that is still there, such as "orders@3". A job reads one version of a cache.
    Raises UnknownCache, with the versions that are there, and InputError for an unknown column, another
    version than the job reads, or no name if no job has a cache.

    `name` may be the address of a table of another system, such as ignite://HOST[:PORT][,HOST...]/CACHE. A
    job that was started on it has read it; outside a job the first call reads it. `tensor`, `fill`, `arrow`,
    `without` and `ragged` are then as on the command line, such as tensor="image=uint8[28,28]" or
    without=["a", "b"].

    Example:
        >>> images, labels = next(iter(insitu.dataset("digits/train").batch(10)))
        >>> images.shape, labels.dtype
        ((10, 64), dtype('int64'))
        >>> numbers = next(iter(insitu.dataset("digits/train", features="row", label=None).batch(4)))
        >>> numbers.dtype
        dtype('int64')
    """
    context = context or context_of_process()
    paths = paths or context.paths
    name, version = split_version(name or _cache_of_job(context))
    if columns or "://" in name:
        # Most scripts need nothing of it.
        from insitu.grid.caches.snapshots import find_snapshot

        name, found = find_snapshot(paths, context, name, columns)
        version = version or found
    cache, shard_map = resolve(name, paths, context, version)
    job, task = context.job, context.task
    if context.role == "evaluator" and shards is None:
        context = context.for_strategy()
        shard_map = replace(shard_map, shards=(tuple(sorted(itertools.chain(*shard_map.shards))),))
    named = [column.name for column in cache.columns]
    if label is not None and label not in named:
        if label != "label":
            raise InputError(
                f"Cache {name} has no column {label!r} for a label. It has {', '.join(named)}"
                f"{suggest_name(label, named)}"
            )
        label = None
    wanted = [features] if isinstance(features, str) else features
    chosen = tuple(column for column in named if column != label) if wanted is None else tuple(wanted)
    unknown = [column for column in chosen if column not in (*named, ROW)]
    if unknown or not chosen:
        raise InputError(
            f"features of cache {name} must be columns out of {', '.join(named)}, or {ROW}, the number of "
            f"the row. Received: {features!r}{suggest_name(unknown[0], named) if unknown else ''}"
        )
    held = tuple(context.shards if shards is None else shards)
    if any(not 0 <= shard < len(shard_map.shards) for shard in held):
        raise InputError(f"Shards are in [0, {len(shard_map.shards)}). Received: {held}")
    if job is not None:
        READS.write_to(job.reads(task))
    else:
        check_here(paths, cache, itertools.chain.from_iterable(shard_map.shards[shard] for shard in held))
    versions = _find_versions(paths, context, cache)
    find_version = None if versions is None else versions.find
    reader = CacheReader(paths, cache, shard_map, held, context.node, chosen, label, find_version)
    return Dataset(reader, context)


def _find_versions(paths: Paths, context: Context, cache: CacheSpec) -> EpochVersions | None:
    """Return which version of the job's cache each epoch reads; None: all read `cache`. So do evaluators."""
    if context.job is None or context.cache != cache.name or context.role == "evaluator":
        return None
    if context.refresh:
        place = (paths, context.job, cache, context.refresh, context.stall_timeout)
        return EpochVersions(*place, asks_supervisor=True)
    try:
        every = int(json.loads(context.job.spec.read_text()).get("refresh", 0))
    except FileNotFoundError:  # on hosts, whose tasks have it in their environment
        return None
    return EpochVersions(paths, context.job, cache, every, context.stall_timeout) if every else None


def _cache_of_job(context: Context) -> str:
    """Return the name of the job's cache. Raises InputError if there is none."""
    if context.cache is None:
        where = "a process outside a job" if context.job is None else "a job without a cache"
        raise InputError(
            f"insitu.dataset() without a name is the cache of the job. Received: {where}. Pass the name of a "
            "cache (`insitu caches` lists them), or start the job with one: `insitu start CACHE JOB_DIR ...`"
        )
    return context.cache
