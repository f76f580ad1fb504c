"""What columns hold, told from a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import UnknownCache
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.service import describe_columns


def describe(tmp_path: Path, rows: int = 4096, **columns: Any) -> dict[str, dict[str, Any]]:
    paths = Paths(tmp_path / "home")
    np.savez(tmp_path / "rows.npz", **columns)
    import_cache(paths, "rows", [str(tmp_path / "rows.npz")], partitions=2)
    found = describe_columns(paths, "rows", rows)
    json.dumps(found, allow_nan=False)
    assert found["rows"] <= max(rows, 1)
    return {column["name"]: column for column in found["columns"]}


def test_of_a_small_cache_statistics_are_exact(tmp_path: Path) -> None:
    count = 200
    columns = describe(
        tmp_path,
        pixels=np.tile(np.arange(16, dtype=np.uint8), (count, 1)),
        score=np.array([np.nan, np.inf, *range(count - 2)], np.float32),
        label=np.arange(count) % 4,
        flag=np.arange(count) % 2 == 0,
        word=np.array(["a", "bbb"] * (count // 2)),
        row=np.arange(count, dtype=np.int64),
    )
    pixels = columns["pixels"]
    assert (pixels["minimum"], pixels["maximum"], pixels["mean"], pixels["zeros"]) == (0, 15, 7.5, 1 / 16)
    assert pixels["histogram"]["counts"] == [count] * 16 and pixels["frequent"] is None
    score = columns["score"]
    assert score["not_finite"] == pytest.approx(2 / count) and score["maximum"] == count - 3
    assert score["mean"] == pytest.approx((count - 3) / 2) and sum(score["histogram"]["counts"]) == count - 2
    assert columns["label"]["frequent"] == [["0", 50], ["1", 50], ["2", 50], ["3", 50]]
    assert columns["flag"]["minimum"] == 0 and columns["flag"]["mean"] == 0.5
    word = columns["word"]
    assert (word["shortest"], word["longest"], word["different"]) == (1, 3, 2) and word["mean"] is None
    # Where nearly all differ, none is frequent.
    assert columns["row"]["different"] == count and columns["row"]["frequent"] == []


def test_extreme_numbers_are_described(tmp_path: Path) -> None:
    columns = describe(
        tmp_path,
        huge=np.array([-1.7e308, 1.7e308] * 4),
        none=np.full(8, np.nan),
        constant=np.full(8, 5.0),
        big=np.array([0, 2**64 - 1] * 4, np.uint64),
    )
    assert columns["huge"]["histogram"] is None and columns["huge"]["maximum"] == 1.7e308
    assert columns["none"]["not_finite"] == 1.0 and columns["none"]["minimum"] is None
    assert columns["constant"]["deviation"] == 0.0 and sum(columns["constant"]["histogram"]["counts"]) == 8
    assert columns["big"]["maximum"] == 2**64 - 1


def test_a_sample_is_bounded(tmp_path: Path) -> None:
    columns = describe(tmp_path, rows=256, x=np.arange(10_000))
    assert columns["x"]["minimum"] >= 0 and columns["x"]["maximum"] < 10_000
    with pytest.raises(UnknownCache):
        describe_columns(Paths(tmp_path / "home"), "nothing")


def test_names_of_classes_stand_beside_their_numbers(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "home")
    for name in ("cat", "dog"):
        np.save(tmp_path / f"{name}.npy", np.zeros((8, 4), np.uint8))
    import_cache(paths, "pets", [str(tmp_path)], partitions=2, label_from_filename=True)
    label = next(c for c in describe_columns(paths, "pets")["columns"] if c["name"] == "label")
    assert sorted(label["frequent"]) == [["0 cat", 8], ["1 dog", 8]]
