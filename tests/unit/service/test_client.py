"""Imports and jobs from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import insitu
from insitu.base.errors import CacheExists, InputError, SourceError
from insitu.base.paths import Paths
from insitu.grid import Catalog


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_data_and_files_become_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache,) = insitu.import_data("a", {"x": np.arange(10), "y": [0.5] * 10}, partitions=2)
    assert (cache.rows, [c.name for c in cache.columns], len(cache.partitions)) == (10, ["x", "y"], 2)
    (tmp_path / "b.csv").write_text("n;v\n1;\n2;3\n")
    assert capsys.readouterr().err == ""
    (cache,) = insitu.import_data("b", tmp_path / "b.csv", fill={"v": "mean"}, rename={"n": "id"})
    assert [c.name for c in cache.columns] == ["id", "v"]
    assert "[insitu] " in (said := capsys.readouterr().err) and "a semicolon between fields" in said
    train, test = insitu.import_data("c", {"x": np.arange(1000)}, split={"train": 0.9, "test": 0.1})
    assert (train.name, test.name, train.rows + test.rows) == ("c/train", "c/test", 1000)
    with pytest.raises(CacheExists):
        insitu.import_data("a", {"x": [1]})
    (cache,) = insitu.import_data("a", {"x": [1]}, overwrite=True)
    assert cache.version == 2


def test_rows_have_their_numbers_also_in_a_sample_and_after_more_rows() -> None:
    insitu.import_data("a", {"x": np.arange(1000)}, row_id="id", partitions=3)
    insitu.import_data("a", {"x": np.arange(1000, 1500)}, append=True, row_id="id")
    rows = {int(x): int(i) for x, i in _read("a", "x", "id")}
    assert rows == {number: number for number in range(1500)}
    (cache,) = insitu.import_data("b", {"x": np.arange(10_000)}, row_id="id", sample=0.25)
    found = _read("b", "x", "id")
    assert all(x == i for x, i in found) and 2200 < len(found) == cache.rows < 2800
    (again,) = insitu.import_data("c", {"x": np.arange(10_000)}, row_id="id", sample=0.25, partitions=5)
    assert sorted(_read("c", "x", "id")) == sorted(found) and again.rows == cache.rows
    (few,) = insitu.import_data("d", {"x": np.arange(10_000)}, limit=7)
    assert few.rows == 7 and sorted(x for (x,) in _read("d", "x")) == list(range(7))


def _read(name: str, *columns: str) -> list[tuple[int, ...]]:
    from insitu.grid import sample_rows

    cache = Catalog(Paths.default()).get(name)
    sample = sample_rows(Paths.default(), name, cache.rows)
    return list(zip(*(sample.columns[column].tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"x": [1]}, {"partition": 3}, "Did you mean .partitions."),
        (42, {}, "The source of an import is"),
        ("nowhere.csv", {}, "doesn't exist"),
        ({"x": [1, None]}, {}, r"Add --fill x=null, which in Python is fill=\['x=null'\]"),
        ({"x": [1]}, {"where": "y > 1"}, "names columns of the sources"),
        ({"x": [1]}, {"delimiter": ";"}, "says how the text of CSV files"),
        ({"x": [1]}, {"limit": 0}, "at least 1"),
    ],
)
def test_what_can_not_be_imported_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, SourceError), match=message):
        insitu.import_data("a", source, **options)
    assert not list(Catalog(Paths.default()).caches())


def test_a_job_that_can_not_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'workers'"):
        insitu.start(None, tmp_path, "train.py", worker=2)
    with pytest.raises(InputError, match=r"doesn't exist|train\.py"):
        insitu.start(None, tmp_path, "train.py")
