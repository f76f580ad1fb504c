"""Two versions of a cache, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.grid import Catalog, import_cache
from insitu.service import compare_versions, version_diff

COUNT = 1000


class Versions:
    """Imports versions of one cache, all of which are kept."""

    def __init__(self, home: Path) -> None:
        self.paths, self._folder = Paths(home), home.parent

    def add(self, table: dict[str, Any], **options: Any) -> str:
        path = self._folder / "source.parquet"
        pq.write_table(pa.table(table), path)
        (cache,) = import_cache(self.paths, "orders", [str(path)], overwrite=True, **options)
        Catalog(self.paths).pin("orders", cache.version, "job")
        return f"orders@{cache.version}"

    def compare(self, before: str, after: str, key: str | None = None) -> dict[str, Any]:
        found = compare_versions(self.paths, before, after, key)
        json.dumps(found, allow_nan=False)
        return found


@pytest.fixture
def versions(home: Path) -> Versions:
    return Versions(home)


def table(count: int = COUNT) -> dict[str, Any]:
    numbers = np.arange(count)
    return {
        "id": numbers,
        "price": np.where(numbers % 3 == 0, np.nan, numbers / 8),
        "word": [f"w{n % 5}" for n in range(count)],
        "image": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4 * count, dtype=np.int16)), 4),
        "tokens": pa.array([list(range(n % 3)) for n in range(count)], pa.list_(pa.int64())),
    }


def test_the_same_rows_are_equal(versions: Versions) -> None:
    before = versions.add(table(), partitions=3, ragged=["tokens"])
    after = versions.add(table(), partitions=3, ragged=["tokens"], compress="zstd")
    shuffled = versions.add(table(), partitions=5, ragged=["tokens"], key="word")
    for pair, key in (((before, after), None), ((before, after), "id"), ((before, shuffled), "id")):
        found = versions.compare(*pair, key)
        assert found["equal"] and found["rows"] == {"added": 0, "removed": 0, "changed": 0, "same": COUNT}
        assert not found["examples"] and not found["changed_by_column"]
    assert not versions.compare(before, shuffled)["equal"]


@pytest.mark.parametrize("few", [False, True])
def test_changes_are_counted_and_shown(
    versions: Versions, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        monkeypatch.setattr(version_diff, "_HASH_BYTES", 1)
    before = versions.add(table(), partitions=3, ragged=["tokens"])
    changed = table(COUNT + 20)
    changed["price"][[1, 4]] = -1.0
    changed["word"][4] = "other"
    kept = np.flatnonzero(np.arange(COUNT + 20) % 100 != 50)
    after = versions.add(
        {name: pa.array(values).take(kept) for name, values in changed.items()},
        partitions=4,
        ragged=["tokens"],
    )
    found = versions.compare(before, after, "id")
    assert found["rows"] == {"added": 20, "removed": 10, "changed": 2, "same": COUNT - 12}
    assert found["changed_by_column"] == {"price": 2, "word": 1}
    examples = {(each["kind"], each["key"]): each["values"] for each in found["examples"]}
    assert examples["changed", 1] == {"price": [0.125, -1.0]}
    assert examples["changed", 4] == {"price": [0.5, -1.0], "word": ["w4", "other"]}
    assert [key for kind, key in examples if kind == "removed"] == sorted(
        key for kind, key in examples if kind == "removed"
    ) or len(examples) == 12
    assert {key for kind, key in examples if kind == "added"} <= set(range(COUNT, COUNT + 20))
    assert {key for kind, key in examples if kind == "removed"} <= set(range(50, COUNT, 100))
    by_word = versions.compare(before, after)
    assert not by_word["equal"] and by_word["key"] is None
    assert by_word["rows"]["added"] == 10 and by_word["rows"]["removed"] == 0


def test_rows_by_position_are_numbered(versions: Versions) -> None:
    before = versions.add({"x": np.arange(10)}, partitions=1)
    values = np.arange(8)
    values[5] = 50
    after = versions.add({"x": values}, partitions=1)
    found = versions.compare(before, after)
    assert found["rows"] == {"added": 0, "removed": 2, "changed": 1, "same": 7}
    first, *others = found["examples"]
    assert first == {
        "kind": "changed",
        "row_before": 5,
        "row_after": 5,
        "key": None,
        "values": {"x": [5, 50]},
    }
    assert [(each["kind"], each["row_before"], each["row_after"]) for each in others] == [
        ("removed", 8, None),
        ("removed", 9, None),
    ]


def test_columns_and_classes_that_differ_are_named(versions: Versions, tmp_path: Path) -> None:
    before = versions.add({"id": np.arange(4), "a": np.arange(4), "b": np.arange(4.0)})
    after = versions.add({"id": np.arange(4), "b": np.arange(4, dtype=np.float32), "c": ["x"] * 4})
    columns = versions.compare(before, after, "id")["columns"]
    assert [each["name"] for each in columns["added"]] == ["c"]
    assert [each["name"] for each in columns["removed"]] == ["a"]
    assert [(e["name"], e["before"]["dtype"], e["after"]["dtype"]) for e in columns["changed"]] == [
        ("b", "float64", "float32")
    ]
    for kind in ("cats", "dogs"):
        (tmp_path / kind).mkdir()
        np.save(tmp_path / kind / f"{kind}.npy", np.zeros((4, 2)))
        import_cache(versions.paths, kind, [str(tmp_path / kind)], label_from_filename=True)
    found = versions.compare("cats", "dogs")
    assert not found["equal"] and found["rows"]["changed"] == 0
    assert found["labels"] == {"before": ["cats"], "after": ["dogs"]}


def test_what_can_not_be_compared_is_refused(versions: Versions) -> None:
    one = versions.add(table() | {"f": np.arange(COUNT) / 2}, ragged=["tokens"])
    two = versions.add(table(), ragged=["tokens"])
    for key in ("nothing", "f", "price", "image", "tokens"):
        with pytest.raises(InputError, match=rf"Received: {key}\. Choose one of id, word"):
            versions.compare(one, two, key)
    with pytest.raises(InputError, match=r"1,000 rows of orders@1 with 5 values in column word"):
        versions.compare(one, two, "word")
    with pytest.raises(UnknownCache, match="versions 1, 2"):
        versions.compare("orders@9", two)
