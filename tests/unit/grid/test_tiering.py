"""What moves to second paths by itself, so that stores keep their quotas."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.context import Context
from insitu.errors import StorageFull
from insitu.grid import (
    Catalog,
    dataset,
    find_slow_copies,
    import_cache,
    measure_move,
    measure_store,
    move_cache,
    set_up_stores,
)
from insitu.grid.files import cache_locks
from insitu.grid.tiering import ColdCache, choose_cold, find_last_use
from insitu.paths import Paths
from insitu.spec import CacheSpec, Column, NodeId, PartitionInfo

NODE = NodeId("node-0")


def candidate(name: str, last_used: float, size: int) -> ColdCache:
    info = PartitionInfo(0, 1, 1, "crc32:00000000", (NODE,))
    return ColdCache(CacheSpec(name, 1, (Column("x", "int64"),), (info,), 0, None, 0.0), last_used, size)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), max_size=8), st.integers(1, 300))
def test_the_oldest_go_and_no_more_than_needed(found: list[tuple[int, int]], need: int) -> None:
    candidates = [candidate(f"c{i}", used, size) for i, (used, size) in enumerate(found)]
    chosen = choose_cold(candidates, need)
    if sum(size for _, size in found) < need:
        assert chosen == []
        return
    assert sum(c.bytes for c in chosen) >= need > sum(c.bytes for c in chosen[:-1])
    assert all(c.bytes for c in chosen)
    rest = [c for c in candidates if c not in chosen and c.bytes]
    assert all(c.last_used >= chosen[-1].last_used for c in rest)


@pytest.fixture
def caches(paths: Paths, tmp_path: Path) -> list[CacheSpec]:
    """Three caches of the same size, on a node with a second path and room for three and a half."""
    (tmp_path / "slow").mkdir()
    np.save(tmp_path / "a.npy", np.arange(100_000))
    set_up_stores(paths, [NODE], tier=tmp_path / "slow")
    found = [import_cache(paths, name, [str(tmp_path / "a.npy")], partitions=2)[0] for name in "abc"]
    set_up_stores(paths, [NODE], quota=measure_store(paths, NODE).used + found[0].bytes // 2)
    for age, cache in zip((30, 20, 10), found, strict=True):
        path = paths.last_read(NODE, cache.name, 1)
        path.touch()
        os.utime(path, (cache.created + 100 - age,) * 2)
    return found


def slow_ones(paths: Paths, caches: list[CacheSpec]) -> list[str]:
    return [cache.name for cache in caches if find_slow_copies(paths, cache)]


def test_an_import_moves_what_was_used_longest_ago(
    paths: Paths, caches: list[CacheSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        import_cache(paths, "d", [str(tmp_path / "a.npy")], partitions=2)
    assert slow_ones(paths, caches) == ["a"]
    assert f"Moved {caches[0].bytes} bytes of a version 1" in caplog.text and "quota of node-0" in caplog.text
    room = measure_store(paths, NODE)
    assert room.quota is not None and room.used <= room.quota


def test_a_dataset_that_is_opened_keeps_its_cache_where_it_is(
    paths: Paths, caches: list[CacheSpec], alone: Context, tmp_path: Path
) -> None:
    os.utime(paths.last_read(NODE, "b", 1), (0, 0))
    before = find_last_use(paths, NODE, caches[0])
    os.utime(paths.last_read(NODE, "a", 1), (0, 0))
    next(iter(dataset("a", context=alone).batch(10)))
    assert find_last_use(paths, NODE, caches[0]) > before - 100
    assert paths.last_read(NODE, "a", 1).stat().st_mtime >= caches[0].created - 1
    os.utime(paths.last_read(NODE, "a", 1), (caches[0].created + 200,) * 2)
    import_cache(paths, "d", [str(tmp_path / "a.npy")], partitions=2)
    assert slow_ones(paths, caches) == ["b"]


def test_what_jobs_use_and_what_is_locked_stays(
    paths: Paths, caches: list[CacheSpec], tmp_path: Path
) -> None:
    Catalog(paths).pin("a", 1, "job")
    with cache_locks(paths, ["b"]), pytest.raises(StorageFull, match="Move caches that are seldom used"):
        import_cache(paths, "d", [str(tmp_path / "a.npy")], partitions=2)
    assert slow_ones(paths, caches) == []
    import_cache(paths, "d", [str(tmp_path / "a.npy")], partitions=2)
    assert slow_ones(paths, caches) == ["b"]


def test_nothing_moves_in_vain(paths: Paths, caches: list[CacheSpec], tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.arange(1_000_000))
    with pytest.raises(StorageFull):
        import_cache(paths, "d", [str(tmp_path / "large.npy")])
    assert slow_ones(paths, caches) == []


def test_moving_back_respects_the_quota(paths: Paths, caches: list[CacheSpec], tmp_path: Path) -> None:
    assert measure_move(paths, "a", "slow") == caches[0].bytes and measure_move(paths, "a", "fast") == 0
    import_cache(paths, "d", [str(tmp_path / "a.npy")], partitions=2)
    with pytest.raises(StorageFull, match=rf"about {caches[0].bytes} more"):
        move_cache(paths, "a", "fast")
    assert slow_ones(paths, caches) == ["a"]
    move_cache(paths, "b", "slow")
    move_cache(paths, "a", "fast")
    assert slow_ones(paths, caches) == ["b"] and measure_move(paths, "b", "fast") == caches[1].bytes


def test_a_second_path_without_room_is_named(
    paths: Paths, caches: list[CacheSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr("insitu.grid.tiering.shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr("insitu.grid.importer.check_room", lambda *_: None)
    with pytest.raises(StorageFull, match=r"second path .*slow.*5 are free"):
        import_cache(paths, "d", [str(tmp_path / "a.npy")], partitions=2)
    assert slow_ones(paths, caches) == []
