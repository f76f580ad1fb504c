"""Rows to look at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import UnknownCache
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.service import preview_rows


def test_rows_are_plain_values_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "home")
    np.savez(
        tmp_path / "rows.npz",
        x=np.arange(40, dtype=np.float32).reshape(10, 4),
        big=np.zeros((10, 5000), np.uint8),
        score=np.array([np.nan, *range(9)], np.float64),
        label=np.arange(10) % 3,
    )
    import_cache(paths, "rows", [str(tmp_path / "rows.npz")], partitions=2)
    shown = preview_rows(paths, "rows", 200, seed=3)
    assert len(shown["rows"]) == 10 and shown == preview_rows(paths, "rows", 200, seed=3)
    for row in shown["rows"]:
        assert row["big"] is None and len(row["x"]) == 4
        start = row["x"][0]
        assert row["x"] == [start, start + 1, start + 2, start + 3] and row["label"] == (start // 4) % 3
    assert "nan" in {row["score"] for row in shown["rows"]}
    json.dumps(shown, allow_nan=False)
    assert len(preview_rows(paths, "rows", 4)["rows"]) == 4
    with pytest.raises(UnknownCache):
        preview_rows(paths, "nothing")
