"""The shard map of a job: written at its start, or agreed upon by its tasks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from grid_jobs import ROWS, job_context, write_own_map

from insitu.base.context import Context
from insitu.base.errors import GridError, InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.grid import Catalog, CatalogWatch, bring_up, dataset, import_cache, install_catalog_copy
from insitu.grid.reading.shards import agree_on_shards, read_shard_map


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


def test_a_version_may_be_named(paths: Paths, source: Path, alone: Context) -> None:
    import_cache(paths, "a", [str(source)], partitions=4)
    Catalog(paths).pin("a", 1, "job-0")
    import_cache(paths, "a", [str(source)], partitions=5, overwrite=True)
    assert dataset("a@1", context=alone).cache.version == 1
    assert dataset("a", context=alone).cache.version == 2
    with pytest.raises(UnknownCache, match=r"version 7 of a, which has versions 1, 2\. Name a@2"):
        dataset("a@7", context=alone)
    with pytest.raises(InputError, match="such as orders@3"):
        dataset("a@x", context=alone)


def test_a_job_reads_one_version_of_a_cache(paths: Paths, source: Path) -> None:
    import_cache(paths, "a", [str(source)], partitions=4)
    import_cache(paths, "b", [str(source)], partitions=5)
    Catalog(paths).pin("b", 1, "job-0")
    import_cache(paths, "b", [str(source)], partitions=6, overwrite=True)
    write_own_map(paths, ("node-0", "node-0"), ((1, 3), (0, 2)))
    assert dataset("b@1", context=job_context(paths, num_shards=2)).cache.version == 1
    assert Catalog(paths).pinned_by("b", 1) == ["job-0", "job-1"]
    assert dataset("b", context=job_context(paths, num_shards=2)).cache.version == 1
    assert dataset("a@1", context=job_context(paths, num_shards=2)).cache.version == 1
    with pytest.raises(InputError, match=r"b@2 in a job that reads version 1"):
        dataset("b@2", context=job_context(paths, num_shards=2))


def test_a_damaged_shard_map_is_named(paths: Paths, cache: str) -> None:
    write_own_map(paths, ("node-0",), ((0,),))
    paths.job("job-1").shard_map("a").write_text("{}")
    with pytest.raises(GridError, match=r"shard map at .* can't be read"):
        dataset("a", context=job_context(paths))


def answer_there(there: Paths, here: Paths | None) -> threading.Thread:
    """Do as the job's supervisor for one question of a task on another host; `here` None: refuse."""
    asked, job = there.job("job-1").wanted_shards("b"), there.job("job-1")

    def answer() -> None:
        deadline = time.monotonic() + 60
        while not asked.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        named = asked.read_text()
        asked.unlink()
        if here is None:
            job.refused_shards("b").write_text("no room is left")
            return
        assert named == "b@1"
        agree_on_shards("b", here, here.job("job-1"), "a", 2, 1)
        job.shard_map("b").write_text(here.job("job-1").shard_map("b").read_text())

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_on_another_host_the_supervisor_agrees(paths: Paths, source: Path, tmp_path: Path) -> None:
    import_cache(paths, "a", [str(source)], partitions=4)
    import_cache(paths, "b", [str(source)], partitions=5)
    there = Paths(tmp_path / "there")
    there.home.mkdir()
    there.nodes.symlink_to(paths.nodes)
    watch = CatalogWatch(paths)
    watch.poll()
    assert watch.data is not None
    install_catalog_copy(there, watch.data)
    for home in (paths, there):
        write_own_map(home, ("node-0", "node-0"), ((1, 3), (0, 2)))
    refusing = answer_there(there, None)
    with pytest.raises(GridError, match="no room is left"):
        dataset("b", context=job_context(there, num_shards=2))
    refusing.join()
    with pytest.raises(UnknownCache):  # nobody needs to be asked for that
        dataset("nothing", context=job_context(there, num_shards=2))
    agreeing = answer_there(there, paths)
    found = dataset("b@1", context=job_context(there, num_shards=2))
    agreeing.join()
    assert found.cache.version == 1 and Catalog(paths).pinned_by("b", 1) == ["job-1"]
    assert found.shard_map == dataset("b", context=job_context(paths, num_shards=2)).shard_map
