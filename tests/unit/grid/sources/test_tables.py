"""Arrow record batches as columns and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import ColumnOptions, open_sources
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.tables import arrow_errors, columns_of_batch, values_of_batch

PATH = Path("a.parquet")


def batch_of(**arrays: Any) -> Any:
    return pa.record_batch(list(arrays.values()), names=list(arrays))


@pytest.mark.parametrize(
    ("array", "column", "values"),
    [
        (pa.array([1, 2], pa.int8()), Column("x", "int8"), [1, 2]),
        (pa.array([True, False]), Column("x", "bool"), [True, False]),
        (pa.array([[1.0, 2.0], [3.0, 4.0]]), Column("x", "float64", (2,)), [[1.0, 2.0], [3.0, 4.0]]),
        (pa.array([[[1], [2]], [[3], [4]]]), Column("x", "int64", (2, 1)), [[[1], [2]], [[3], [4]]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), Column("x", "int16", (2,)), [[1, 2], [3, 4]]),
        (pa.array([5, 6]).dictionary_encode(), Column("x", "int64"), [5, 6]),
        (pa.array([1.5, None], pa.float32()), Column("x", "float32"), [1.5, np.nan]),
    ],
    ids=["integers", "bools", "lists", "lists of lists", "fixed-size lists", "dictionary", "missing float"],
)
def test_numbers_are_arrays(array: Any, column: Column, values: list[Any]):
    batch = batch_of(x=array)
    assert columns_of_batch(batch, PATH) == (column,)
    found = values_of_batch(batch, (column,), PATH)["x"]
    assert found.dtype == np.dtype(column.dtype)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("array", [pa.array(["a", "é"]), pa.array(["a", "é"]).dictionary_encode()])
def test_text_stays_in_arrow(array: Any):
    batch = batch_of(x=array)
    assert columns_of_batch(batch, PATH) == (Column("x", "str"),)
    found = values_of_batch(batch, (Column("x", "str"),), PATH)["x"]
    assert found.type == pa.large_utf8() and found.to_pylist() == ["a", "é"]


@pytest.mark.parametrize(
    ("array", "dtype", "values"),
    [
        (pa.array([[], [1, 2], [3]], pa.list_(pa.int16())), "int16[*]", [[], [1, 2], [3]]),
        (
            pa.array([[9], [], [1.5, None]], pa.large_list(pa.float64())),
            "float64[*]",
            [[9], [], [1.5, np.nan]],
        ),
        (pa.array([[True], [False, True]]), "bool[*]", [[True], [False, True]]),
        (pa.array([[0, 0], [1, 2]], pa.list_(pa.uint8(), 2)), "uint8[*]", [[0, 0], [1, 2]]),
    ],
)
@pytest.mark.parametrize("start", [0, 1])
def test_lists_of_a_ragged_column_may_have_any_length(array: Any, dtype: str, values: list[Any], start: int):
    column = Column("x", dtype)
    assert columns_of_batch(batch_of(x=array), PATH, frozenset({"x"})) == (column,)
    found = values_of_batch(batch_of(x=array).slice(start), (column,), PATH)["x"]
    assert found.type == pa.large_binary()
    rows = [np.frombuffer(row, dtype.removesuffix("[*]")) for row in found.to_pylist()]
    for row, wanted in zip(rows, values[start:], strict=True):
        np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([[[1], [2]], [[3], [4]]]), "lists of numbers or bools"),
        (pa.array([["a"]]), "lists of numbers or bools"),
        (pa.array([[1], None]), "misses 1 value|has no value"),
        (pa.array([[1, None]]), "Add --dtype x=float64"),
    ],
)
def test_what_is_no_ragged_column_is_refused(array: Any, message: str):
    batch = batch_of(x=array)
    with pytest.raises((InputError, SourceError), match=message):
        columns_of_batch(batch, PATH, frozenset({"x"}))
        values_of_batch(batch, (Column("x", "int64[*]"),), PATH)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            pa.record_batch([pa.array([1]), pa.array([2])], names=["x", "x"]),
            "several columns of one name.*'x'",
        ),
        (batch_of(x=pa.array([[], [1]], pa.list_(pa.int8()))), "lists of 0 to 1 values. Add --ragged x"),
        (batch_of(x=pa.array([[{"a": 1}]]), y=pa.array([["a"]])), "Add --dtype x=json --dtype y=json"),
    ],
)
def test_what_can_be_no_column_is_refused(batch: Any, message: str):
    with pytest.raises(SourceError, match=message):
        columns_of_batch(batch, PATH)


@pytest.mark.parametrize(
    ("array", "column", "message"),
    [
        (pa.array([1, None]), Column("x", "int64"), "has no value"),
        (pa.array(["a", None]), Column("x", "str"), "has no value"),
        (pa.array([[1], [2, 3]]), Column("x", "int64", (1,)), "lists of 1 and of 2 values.*--ragged x"),
        (pa.array([[1, 2]]), Column("x", "int64", (1,)), r"first \[1\], then \[2\].*size=224,224 .*mode=RGB"),
        (pa.array([1.5]), Column("x", "int64"), "of type double, must be int64.*--dtype x=DTYPE"),
    ],
)
def test_rows_that_differ_are_refused(array: Any, column: Column, message: str):
    with pytest.raises(SourceError, match=message):
        values_of_batch(batch_of(x=array), (column,), PATH)


def test_errors_of_arrow_name_the_file_and_those_of_the_system_stay():
    with pytest.raises(SourceError, match=r"a\.parquet can't be read: no magic"), arrow_errors(PATH):
        raise pa.ArrowInvalid("no magic")
    with pytest.raises(PermissionError), arrow_errors(PATH):
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_name_that_a_table_has_twice_gets_a_number(tmp_path: Path, format: str) -> None:
    arrays = [pa.array([1, 2]), pa.array(["x", None]), pa.array([{"c": 5}, {"c": 6}]), pa.array([7, None])]
    table = pa.Table.from_arrays(arrays, names=["b", "a", "b", "b"])
    path = tmp_path / f"t.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        pa.feather.write_feather(table, path)
    fields = ColumnOptions(columns=("b_3", "a", "b_2.c", "b"), fills={"a": "-", "b_3": "8"})
    (source,) = open_sources([(path, format)], SourceOptions(fields=fields))
    assert source.notes == ("column 3, another b, is b_2", "column 4, another b, is b_3")
    (block,) = source.blocks(1 << 20)
    values = {name: each.tolist() for name, each in block.columns.items() if name != "a"}
    assert values == {"b_3": [7, 8], "b_2.c": [5, 6], "b": [1, 2]}
    assert block.columns["a"].to_pylist() == ["x", "-"]
    (source,) = open_sources(
        [(path, format)], SourceOptions(fields=ColumnOptions(columns=("a",), fills={"a": ""}))
    )
    assert [block.columns["a"].to_pylist() for block in source.blocks(1 << 20)] == [["x", ""]]
