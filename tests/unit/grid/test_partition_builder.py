"""Rows on their way into partitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from insitu.grid import import_cache
from insitu.grid.partitions import Partition
from insitu.paths import Paths


def test_a_text_column_of_empty_texts_alone(paths: Paths, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(5), t=np.array([""] * 5))
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.npz")], partitions=2)
    for info in cache.partitions:
        partition = Partition(
            paths.partition("node-0", "a", 1, info.index), cache.columns, info.rows, cache.block_rows
        )
        assert partition.values["t"].slice(0, info.rows).tolist() == [""] * info.rows
