"""Rows that objects of Python give."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import ArrowSource, SourceOptions, arrange_tables, find_table, open_object


def read(data: Any, folder: Path) -> tuple[tuple[Column, ...], dict[str, list[Any]]]:
    source = ArrowSource(open_object(data, folder))
    arrange_tables([source], SourceOptions())
    values: dict[str, list[Any]] = {column.name: [] for column in source.columns}
    starts = [0]
    for block in source.blocks(64):
        starts.append(block.next_start)
        for name, each in block.columns.items():
            values[name] += each.to_pylist() if hasattr(each, "to_pylist") else each.tolist()
    rows = len(next(iter(values.values())))
    assert (starts[-1] == rows and source.expected_rows == rows) or not source.counts_rows
    rest = [row for block in source.blocks(64, starts[-2]) for row in range(block.rows)]
    assert len(rest) == rows - starts[-2]
    return source.columns, values


IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)


def give_rows() -> Any:
    yield from ({"i": i, "v": np.arange(2) + i, "s": str(i)} for i in range(3000))


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (IMAGES, (Column("x", "uint8", (2, 3)),)),
        (np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), (Column("a", "int32"), Column("b", "float64"))),
        ({"x": IMAGES, "y": [1, 2, 3, 4]}, (Column("x", "uint8", (2, 3)), Column("y", "int64"))),
        ({"s": np.array(["a", "b"]), "l": [[1], [2]]}, (Column("s", "str"), Column("l", "int64", (1,)))),
        (pa.table({"a": [1, 2]}), (Column("a", "int64"),)),
        (pa.record_batch({"a": [1, 2]}), (Column("a", "int64"),)),
        (give_rows(), (Column("i", "int64"), Column("v", "int64", (2,)), Column("s", "str"))),
        ([{"a": 1}, {"a": 2}], (Column("a", "int64"),)),
        ((pa.table({"a": [i]}) for i in range(3)), (Column("a", "int64"),)),
    ],
    ids=["array", "structured", "images", "lists", "table", "batch", "generator", "rows", "tables"],
)
def test_objects_have_columns(tmp_path: Path, data: Any, columns: tuple[Column, ...]) -> None:
    assert read(data, tmp_path)[0] == columns


def test_values_are_those_of_the_object(tmp_path: Path) -> None:
    _, found = read(give_rows(), tmp_path)
    assert found["i"] == list(range(3000)) and found["v"][-1] == [2999, 3000] and found["s"][7] == "7"
    assert read({"x": IMAGES}, tmp_path)[1]["x"] == IMAGES.tolist()


def test_a_dataset_of_arrow_is_read_by_its_files(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.table({"a": [number, number]}), tmp_path / f"{number}.parquet")
    assert read(pyarrow.dataset.dataset(tmp_path), tmp_path)[1] == {"a": [0, 0, 1, 1, 2, 2]}


def test_a_dataset_of_tensorflow_has_features_and_a_label(tmp_path: Path) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(({"a": np.arange(5), "s": list("abcde")}, np.arange(5.0)))
    columns, found = read(data, tmp_path)
    assert [column.name for column in columns] == ["a", "s", "label"]
    assert found == {"a": [0, 1, 2, 3, 4], "s": list("abcde"), "label": [0.0, 1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (42, "The source of an import is a path"),
        ({"x": [1], "y": [1, 2]}, "as many rows each"),
        ({"x": [1, "a"]}, "Received: 'x', which is none"),
        ({}, "as many rows each"),
        ([1, 2], "yields dicts, or tables. Received: int"),
        (iter(()), "no rows"),
        (({"x": i if i < 1500 else "a"} for i in range(3000)), "of one type|the columns and types"),
    ],
)
def test_what_has_no_rows_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises((InputError, SourceError), match=message):
        open_object(data, tmp_path)


@pytest.mark.parametrize(
    ("source", "sql", "version", "message"),
    [
        ("sqlite:///nowhere.db", None, None, "--sql says which rows"),
        ("postgresql://me:secret@host/db", None, None, r"postgresql://me:\*\*\*@host/db without it"),
        ("mysql://host/db", "select 1", None, "--sql goes with a database's URL"),
        ("rows.csv", None, "3", "--table-version is of Delta and Iceberg tables"),
    ],
)
def test_what_names_no_table_is_refused(
    source: str, sql: str | None, version: str | None, message: str
) -> None:
    with pytest.raises((InputError, SourceError), match=message):
        find_table(source, sql, version)


def test_what_a_missing_library_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.grid.sources.streams.import_module", _refuse)
    sqlite3.connect(tmp_path / "a.db").close()
    for source, sql, extra in (
        (f"sqlite://{tmp_path}/a.db", "select 1", "sqlite"),
        (f"delta://{tmp_path}", None, "delta"),
        (f"iceberg://{tmp_path}", None, "iceberg"),
    ):
        with pytest.raises(InputError, match=rf"pip install 'insitu\[{extra}\]'"):
            find_table(source, sql, None)


def _refuse(name: str) -> Any:
    raise ImportError(f"No module named {name!r}")


def test_arrays_lose_neither_masks_nor_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="masked values in arrays of several axes"):
        open_object({"x": np.ma.array([[1, 2]], mask=[[False, True]])}, tmp_path)
    with pytest.raises(InputError, match="a name of its own"):
        open_object({"1": [1], 1: [2]}, tmp_path)
