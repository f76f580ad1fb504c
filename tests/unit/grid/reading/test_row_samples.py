"""Samples of rows: bounded, by runs of neighbours, of what is on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import GridError, UnknownCache
from insitu.base.paths import Paths
from insitu.grid import import_cache, sample_rows
from insitu.grid.reading import row_samples


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "home")
    np.savez(tmp_path / "rows.npz", x=np.arange(1000), y=np.arange(2000.0).reshape(1000, 2))
    import_cache(made, "rows", [str(tmp_path / "rows.npz")], partitions=3)
    return made


@pytest.mark.parametrize("run", [1, 16])
def test_a_sample_follows_from_its_seed(paths: Paths, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_samples, "_BLOCK_BYTES", 100 if run > 1 else 1 << 20)
    sample = sample_rows(paths, "rows", 64, seed=5, places=4)
    assert (sample.rows, sample.run) == (64, run)
    assert len(np.unique(sample.columns["x"])) == sample.rows
    np.testing.assert_array_equal(sample.columns["y"][:, 0], 2.0 * sample.columns["x"])
    again, other = sample_rows(paths, "rows", 64, 5, 4), sample_rows(paths, "rows", 64, 6, 4)
    np.testing.assert_array_equal(again.columns["x"], sample.columns["x"])
    assert set(other.columns["x"]) != set(sample.columns["x"])


@pytest.mark.parametrize("block_bytes", [1 << 20, 100])
def test_sorted_classes_keep_their_shares(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_samples, "_BLOCK_BYTES", block_bytes)
    made = Paths(tmp_path / "home")
    np.savez(tmp_path / "rows.npz", x=np.repeat(np.arange(10), 5000))
    import_cache(made, "rows", [str(tmp_path / "rows.npz")], partitions=2)
    sample = sample_rows(made, "rows", 4096, places=256)
    assert sample.run == (1 if block_bytes > 100 else 16)
    shares = np.bincount(sample.columns["x"]) / sample.rows
    assert abs(shares - 0.1).max() < 0.03


def test_all_rows_come_where_there_are_no_more(paths: Paths) -> None:
    assert sorted(sample_rows(paths, "rows", 5000).columns["x"]) == list(range(1000))
    with pytest.raises(UnknownCache):
        sample_rows(paths, "nothing", 5)


def test_rows_that_take_much_memory_are_fewer(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_samples, "MOST_BYTES", 24 * 10)
    assert 1 <= sample_rows(paths, "rows", 500).rows <= 10


def test_on_the_head_of_hosts_rows_are_those_that_lie_here(paths: Paths, tmp_path: Path) -> None:
    from insitu.grid import Catalog

    cache = Catalog(paths).get("rows")
    paths.head.parent.mkdir(parents=True, exist_ok=True)
    paths.head.write_text("{}")
    nodes = {partition.owners[0] for partition in cache.partitions}
    assert sample_rows(paths, "rows", 10).rows == 10
    for node in nodes:
        shutil.rmtree(paths.node(node))
    with pytest.raises(GridError, match="insitu fetch rows"):
        sample_rows(paths, "rows", 10)
