"""Contexts and shard maps for tests that read a cache as a task of a job does."""

from __future__ import annotations

import threading
from typing import Any

from insitu.base.context import Context
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, ShardMap, TaskId
from insitu.grid.reading.shards import shard_map_to_json

ROWS = 1000
"""Rows of the file that the fixture `source` of the grid's tests makes."""


def context(paths: Paths, shards: tuple[int, ...] = (0,), num_shards: int = 1, **more: Any) -> Context:
    return Context(paths=paths, shards=shards, num_shards=num_shards, **more)


def wait_for_repairs() -> None:
    """Return when this process repairs no copy any more."""
    for thread in threading.enumerate():
        if thread.name == "insitu-repairs":
            thread.join(60)


def job_context(paths: Paths, task: str = "worker:0", **more: Any) -> Context:
    return context(paths, job_id="job-1", task=TaskId.parse(task), cache="a", node=NodeId("node-0"), **more)


def write_own_map(
    paths: Paths, homes: tuple[str, ...], shards: tuple[tuple[int, ...], ...], cache: str = "a"
) -> None:
    path = paths.job("job-1").shard_map(cache)
    path.parent.mkdir(parents=True)
    nodes = tuple(NodeId(home) for home in homes)
    path.write_text(shard_map_to_json(ShardMap(cache, 1, shards), nodes))
