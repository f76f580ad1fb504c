"""The shard map of a job: written at its start, or agreed upon by its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from grid_jobs import ROWS, job_context, write_own_map

from insitu.errors import GridError
from insitu.grid import Catalog, bring_up, dataset, import_cache
from insitu.grid.shards import read_shard_map
from insitu.paths import Paths


def test_in_a_job_the_shards_are_those_that_were_written(paths: Paths, source: Path) -> None:
    import_cache(paths, "a", [str(source)], partitions=4)
    Catalog(paths).pin("a", 1, "job-1")
    write_own_map(paths, ("node-0", "node-0"), ((0, 3), (1, 2)))
    import_cache(paths, "a", [str(source)], partitions=4, overwrite=True)
    ds = dataset("a", context=job_context(paths, num_shards=2))
    assert ds.shard_map.shards == ((0, 3), (1, 2)) and ds.cache.version == 1
    with pytest.raises(GridError, match="has 2 shards, this task expects 3"):
        dataset("a", context=job_context(paths, num_shards=3))


def test_another_cache_is_agreed_upon_once_and_pinned(paths: Paths, source: Path) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [str(source)], partitions=4)
    import_cache(paths, "b", [str(source)], partitions=5)
    write_own_map(paths, ("node-1", "node-0"), ((1, 3), (0, 2)))
    first = dataset("b", context=job_context(paths, num_shards=2))
    assert first.shard_map.shards == ((1, 3), (0, 2, 4))
    assert Catalog(paths).pinned_by("b", 1) == ["job-1"]
    import_cache(paths, "b", [str(source)], partitions=7, overwrite=True)
    second = dataset("b", context=job_context(paths, "worker:1", num_shards=2))
    assert second.shard_map == first.shard_map and second.rows == ROWS
    found = read_shard_map(paths.job("job-1").shard_map("b"))
    assert found is not None and found[1] == ("node-1", "node-0")
    assert list(second.batch(100))


def test_a_damaged_shard_map_is_named(paths: Paths, cache: str) -> None:
    write_own_map(paths, ("node-0",), ((0,),))
    paths.job("job-1").shard_map("a").write_text("{}")
    with pytest.raises(GridError, match=r"shard map at .* can't be read"):
        dataset("a", context=job_context(paths))
