"""The catalogue is read once for many who look at it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from insitu.base.paths import Paths
from insitu.grid import Catalog, import_cache
from insitu.service import CatalogIndex
from insitu.service import caches as module


def test_it_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Paths(tmp_path / "home")
    index = CatalogIndex(paths)
    assert index.read() == module.Versions([], [])
    np.savez(tmp_path / "rows.npz", x=np.arange(10))
    import_cache(paths, "a", [str(tmp_path / "rows.npz")])
    clock = os.stat(paths.catalog).st_mtime_ns + 2 * module._TICK
    monkeypatch.setattr(module.time, "time_ns", lambda: clock)
    first = index.read()
    assert [cache.name for cache in first.latest] == ["a"] and first.stored == first.latest
    assert index.read() is first
    Catalog(paths).pin("a", 1, "job")
    import_cache(paths, "a", [str(tmp_path / "rows.npz")], overwrite=True)
    second = index.read()
    assert [cache.version for cache in second.latest] == [2]
    assert [cache.version for cache in second.stored] == [1, 2]


def test_a_change_within_a_tick_of_the_clock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Paths(tmp_path / "home")
    np.savez(tmp_path / "rows.npz", x=np.arange(10))
    import_cache(paths, "a", [str(tmp_path / "rows.npz")])
    index = CatalogIndex(paths)
    monkeypatch.setattr(module.time, "time_ns", lambda: os.stat(paths.catalog).st_mtime_ns + 1)
    before = os.stat(paths.catalog)
    assert index.read().latest[0].version == 1
    import_cache(paths, "a", [str(tmp_path / "rows.npz")], overwrite=True)
    os.utime(paths.catalog, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert index.read().latest[0].version == 2
