"""Rows on their way into partitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import SourceError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.grid.partitions import Partition


def test_a_text_column_of_empty_texts_alone(paths: Paths, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(5), t=np.array([""] * 5))
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.npz")], partitions=2)
    for info in cache.partitions:
        partition = Partition(
            paths.partition("node-0", "a", 1, info.index), cache.columns, info.rows, cache.block_rows
        )
        assert partition.values["t"].slice(0, info.rows).tolist() == [""] * info.rows


def test_texts_that_are_longer_than_the_first_ones_make_smaller_blocks(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.intake.partition_builder.MOST_TEXT_BYTES", 200_000)
    monkeypatch.setattr("insitu.grid.intake.import_plan._SAMPLE_BYTES", 1000)
    texts = ["short"] * 200 + ["long" * 250] * 2000
    (tmp_path / "a.csv").write_text("t\n" + "".join(f"{text}\n" for text in texts))
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.csv")], partitions=2, resume=True)
    assert cache.block_rows < 200 and cache.rows == len(texts)
    found = []
    for info in cache.partitions:
        path = paths.partition("node-0", "a", 1, info.index)
        partition = Partition(path, cache.columns, info.rows, cache.block_rows)
        found += partition.values["t"].slice(0, info.rows).tolist()
    assert sorted(found) == sorted(texts)
    (tmp_path / "b.csv").write_text("t\n" + "x" * 100_000 + "\n" + ("y" * 100_000 + "\n") * 9)
    with pytest.raises(SourceError, match="must be like the rows of the cache"):
        import_cache(paths, "a", [str(tmp_path / "b.csv")], append=True)


def test_one_very_long_text_is_no_reason_for_smaller_blocks(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("t\n" + "short\n" * 1000 + "x" * (5 << 20) + "\n" + "short\n" * 1000)
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.csv")], partitions=1)
    assert cache.block_rows > 10_000 and cache.rows == 2001
