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
from insitu.service import describe_columns, measure_columns


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


def test_all_rows_are_measured_in_portions(tmp_path: Path) -> None:
    paths, count = Paths(tmp_path / "home"), 300_000
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "number": np.arange(count),
        "few": random.integers(-3, 4, count).astype(np.int16),
        "x": np.where(np.arange(count) % 5 == 0, np.nan, 100 + random.normal(size=count)),
        "wide": random.integers(-(2**62), 2**62, count),
        "image": random.integers(0, 256, (count, 3)).astype(np.uint8),
        "zero": np.where(np.arange(count) % 2 == 0, -0.0, 0.0),
        "word": np.array(["a", "bbb", "ccccc"])[np.arange(count) % 3],
    }
    np.savez(tmp_path / "rows.npz", **columns)
    import_cache(paths, "rows", [str(tmp_path / "rows.npz")], partitions=3)
    seen: list[int] = []
    report = measure_columns(paths, "rows", progress=lambda done, total: seen.append(total - done))
    json.dumps(report, allow_nan=False)
    assert (report["rows"], report["rows_of_cache"], report["seed"]) == (count, count, None)
    assert len(seen) > 10 and seen[-1] == 0 and seen == sorted(seen, reverse=True)
    found = {column["name"]: column for column in report["columns"]}
    for name in ("number", "few", "x", "wide", "image"):
        values = columns[name].reshape(-1)
        finite = values[~np.isnan(values)] if name == "x" else values
        assert (found[name]["minimum"], found[name]["maximum"]) == (finite.min(), finite.max())
        assert found[name]["mean"] == pytest.approx(finite.mean(dtype=np.float64), rel=1e-9, abs=1e3)
        assert found[name]["deviation"] == pytest.approx(finite.astype(np.float64).std(), rel=1e-9)
        histogram = found[name]["histogram"]
        assert 7 <= len(histogram["counts"]) <= 20
        expected, _ = np.histogram(finite.astype(np.float64), histogram["edges"])
        assert histogram["counts"] == expected.tolist() and sum(expected) == len(finite)
    assert found["number"]["is_estimate"] and abs(found["number"]["different"] / count - 1) < 0.06
    assert (found["few"]["different"], found["few"]["is_estimate"]) == (7, False)
    assert dict(found["few"]["frequent"])["-3"] == np.count_nonzero(columns["few"] == -3)
    assert (found["x"]["nan"], found["x"]["infinite"]) == (count // 5, 0)
    assert found["zero"]["different"] == 1 and found["zero"]["zeros"] == 1.0
    distinct = len(np.unique(columns["image"], axis=0))
    assert abs(found["image"]["different"] / distinct - 1) < 0.06
    assert (found["word"]["shortest"], found["word"]["longest"], found["word"]["different"]) == (1, 5, 3)
    assert found["word"]["frequent"][0][1] == count // 3


def test_a_drawn_sample_is_measured(tmp_path: Path) -> None:
    paths, count = Paths(tmp_path / "home"), 50_000
    np.savez(tmp_path / "rows.npz", n=np.arange(count), word=np.array([f"w{n}" for n in range(count)]))
    import_cache(paths, "rows", [str(tmp_path / "rows.npz")], partitions=3)
    report = measure_columns(paths, "rows", 3000, seed=4)
    number, word = report["columns"]
    assert (report["rows"], report["run"], report["seed"]) == (3000, 1, 4)
    assert number["different"] == word["different"] == 3000
    assert abs(number["mean"] / (count / 2) - 1) < 0.05
    assert measure_columns(paths, "rows", 3000, seed=4) == report
    assert measure_columns(paths, "rows", 10 * count)["rows"] == count
