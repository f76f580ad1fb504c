"""The shard map of a job and a cache: read from the job's folder, or agreed upon by its tasks."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from insitu.base.context import Context
from insitu.base.disk.durable import replace_file
from insitu.base.errors import GridError, InputError, UnknownCache
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import CacheSpec, NodeId, ShardMap
from insitu.grid.catalog import Catalog, is_catalog_copy, publish_first
from insitu.grid.layout import shard_partitions
from insitu.grid.replicas import load_topology

_ATTEMPTS = 5
_AGREEMENT_SECONDS = 900.0
"""Seconds in which the shards of another cache are agreed upon, and its partitions brought to their
readers."""
_LOOK_SECONDS = 0.05


def shard_map_to_json(shard_map: ShardMap, homes: tuple[NodeId, ...]) -> str:
    """Return the JSON for `JobPaths.shard_map(cache)`: the map, and each shard's home node."""
    return json.dumps(
        {
            "cache": shard_map.cache,
            "version": shard_map.version,
            "shards": shard_map.shards,
            "homes": homes,
        }
    )


def read_shard_map(path: Path) -> tuple[ShardMap, tuple[NodeId, ...]] | None:
    """Return (map, homes) from `path`, or None if there is no such file. Raises GridError."""
    try:
        data = json.loads(path.read_text())
        shards = tuple(tuple(int(p) for p in shard) for shard in data["shards"])
        shard_map = ShardMap(str(data["cache"]), int(data["version"]), shards)
        return shard_map, tuple(NodeId(str(home)) for home in data["homes"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise GridError(f"The shard map at {path} can't be read ({error}). Start the job again") from error


def resolve(
    name: str, paths: Paths, context: Context, version: int | None = None
) -> tuple[CacheSpec, ShardMap]:
    """Return the version of cache `name` that this process reads, and its shards.

    In a job all incarnations of all tasks get the same answer: `start` wrote it down for the job's own cache,
    and for another one the first task that asks does, for `version`, and pins it. None means the one that is
    then the latest. Outside a job it is `version`, by default the latest.
    Raises UnknownCache, GridError, and InputError for another version than the one that the job reads.
    """
    catalog = Catalog(paths)
    if context.job is None:
        cache = catalog.get(name, version)
        homes = _homes_in_turn(paths, context.num_shards)
        return cache, ShardMap(name, cache.version, shard_partitions(cache.partitions, homes))
    path = context.job.shard_map(name)
    found = read_shard_map(path)
    if found is None:
        if is_catalog_copy(paths):
            _ask_for_agreement(name, paths, context.job, version)
        else:
            agree_on_shards(name, paths, context.job, context.cache, context.num_shards, version)
        found = read_shard_map(path)
    if found is None:
        raise GridError(f"The shard map at {path} is missing. Start the job again")
    shard_map, _ = found
    if len(shard_map.shards) != context.num_shards:
        raise GridError(
            f"The shard map at {path} has {len(shard_map.shards)} shards, this task expects "
            f"{context.num_shards}. Start the job again"
        )
    if version not in (None, shard_map.version):
        raise InputError(
            f"A job reads one version of a cache. Received: {name}@{version} in a job that reads version "
            f"{shard_map.version}. Name {name} alone, or start a job on {name}@{version}"
        )
    return catalog.get(name, shard_map.version), shard_map


def agree_on_shards(
    name: str, paths: Paths, job: JobPaths, own_cache: str | None, shards: int, version: int | None = None
) -> None:
    """Write down which version of another cache than its own a job reads, and its shards; pin that version.

    The first process that asks decides. `own_cache`: the cache that the job was started on. `version`: the
    one that is asked for; None: the latest.
    Raises UnknownCache.
    """
    own = read_shard_map(job.shard_map(own_cache)) if own_cache else None
    homes = own[1] if own else _homes_in_turn(paths, shards)
    catalog = Catalog(paths)
    for attempt in range(_ATTEMPTS):
        cache = catalog.get(name, version)
        try:
            catalog.pin(name, cache.version, job.root.name)
            break
        except UnknownCache:  # replaced by a newer version in this very moment
            if attempt == _ATTEMPTS - 1:
                raise
    shard_map = ShardMap(name, cache.version, shard_partitions(cache.partitions, homes))
    publish_first(job.shard_map(name), shard_map_to_json(shard_map, homes).encode())


def _ask_for_agreement(name: str, paths: Paths, job: JobPaths, version: int | None) -> None:
    """Wait until the job's supervisor has agreed on the shards of a cache for tasks on all hosts.

    Only there the catalogue can be changed. Raises UnknownCache, GridError.
    """
    Catalog(paths).get(name, version)
    path, refused = job.shard_map(name), job.refused_shards(name)
    refused.unlink(missing_ok=True)
    replace_file(job.wanted_shards(name), (name if version is None else f"{name}@{version}").encode())
    deadline = time.monotonic() + _AGREEMENT_SECONDS
    while time.monotonic() < deadline:
        if (found := read_shard_map(path)) is not None:
            with contextlib.suppress(UnknownCache):  # its copy of the catalogue comes
                Catalog(paths).get(name, found[0].version)
                return
        elif refused.exists():
            raise GridError(refused.read_text())
        time.sleep(_LOOK_SECONDS)
    raise GridError(
        f"The shards of {name} must come from the head's machine within {_AGREEMENT_SECONDS:g} s. Received: "
        f"nothing. See whether the job's supervisor runs there"
    )


def _homes_in_turn(paths: Paths, shards: int) -> tuple[NodeId, ...]:
    nodes = load_topology(paths).nodes
    return tuple(nodes[s % len(nodes)] for s in range(shards))
