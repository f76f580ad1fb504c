"""Reads a job's specification and placement from its folder."""

from __future__ import annotations

import json

from insitu.errors import ClusterError, InputError
from insitu.paths import JobPaths
from insitu.spec import CacheSpec, JobSpec, NodeId, Placement, ShardMap, TaskId, TaskSpec


def read_spec(job: JobPaths) -> JobSpec:
    """Return the job's specification. Raises ClusterError where the folder doesn't hold a job."""
    try:
        return JobSpec.from_json(json.loads(job.spec.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as error:
        raise ClusterError(
            f"The job's specification can't be read: {error}. Start a new job; this folder is of no use",
            logs=str(job.spec),
        ) from error


def read_placement(job: JobPaths) -> tuple[Placement, CacheSpec]:
    """Return the placement, and the cache as it was when the job was started. Raises ClusterError."""
    try:
        data = json.loads(job.placement.read_text())
        cache = CacheSpec.from_json(data["cache"])
        shards = json.loads(job.shard_map(cache.name).read_text())["shards"]
        tasks = tuple(
            TaskSpec(TaskId.parse(t["task"]), NodeId(t["node"]), tuple(t["shards"])) for t in data["tasks"]
        )
        shard_map = ShardMap(cache.name, cache.version, tuple(map(tuple, shards)))
        return Placement(tasks, shard_map, tuple(map(NodeId, data["homes"]))), cache
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as error:
        raise ClusterError(
            f"The job's placement can't be read: {error}. Start a new job; this folder is of no use",
            logs=str(job.placement),
        ) from error
