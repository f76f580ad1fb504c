"""The columns that tables make together."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import (
    ColumnProblems,
    SourceOptions,
    find_sources,
    open_sources,
    parse_column_options,
)
from insitu.grid.sources.table_layout import widen

NOON = datetime.datetime(2020, 1, 2, 12)


def read(folder: Path, tables: list[Any], ragged: tuple[str, ...] = (), **options: Any) -> tuple[Any, Any]:
    """Write tables as files, and return the columns that they make together, and all values."""
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"{number}.parquet")
    given = SourceOptions(fields=parse_column_options(options), ragged_columns=frozenset(ragged))
    sources = open_sources(find_sources([str(folder)], None), given)
    values: dict[str, list[Any]] = {column.name: [] for column in sources[0].columns}
    for source in sources:
        assert source.columns == sources[0].columns
        for block in source.blocks(1 << 20):
            for name, each in block.columns.items():
                values[name] += each.to_pylist() if hasattr(each, "to_pylist") else each.tolist()
    return sources[0].columns, values


@pytest.mark.parametrize(
    ("array", "column", "values"),
    [
        (pa.array([NOON], pa.timestamp("ms")), Column("x", "int64", (), "timestamp[ms]"), [1577966400000]),
        (
            pa.array([NOON], pa.timestamp("us", "Europe/Rome")),
            Column("x", "int64", (), "timestamp[us, tz=Europe/Rome]"),
            [1577966400000000],
        ),
        (pa.array([NOON.date()]), Column("x", "int64", (), "date32[day]"), [18263]),
        (pa.array([NOON.time()], pa.time32("ms")), Column("x", "int64", (), "time32[ms]"), [43200000]),
        (pa.array([5], pa.duration("us")), Column("x", "int64", (), "duration[us]"), [5]),
        (pa.array([Decimal("1.25"), None]), Column("x", "float64"), [1.25, np.nan]),
        (pa.array([b"ab", b""]), Column("x", "uint8[*]"), [b"ab", b""]),
        (pa.array([b"ab"], pa.binary(2)), Column("x", "uint8", (2,)), [[97, 98]]),
        (pa.array(["a", "b"]).dictionary_encode(), Column("x", "str"), ["a", "b"]),
        (pa.nulls(2), Column("x", "float64"), [np.nan, np.nan]),
    ],
)
def test_types_of_arrow_become_columns(tmp_path: Path, array: Any, column: Column, values: list[Any]) -> None:
    columns, found = read(tmp_path, [pa.table({"x": array})])
    assert columns == (column,)
    np.testing.assert_equal(found["x"], values)


def test_fields_of_structs_are_columns(tmp_path: Path) -> None:
    rows = [{"name": "a", "at": {"x": 1.5}}, None]
    kind = pa.struct([("name", pa.string()), ("at", pa.struct([("x", pa.float64())]))])
    table = pa.table({"user": pa.array(rows, kind), "n": [1, 2]})
    columns, found = read(tmp_path, [table], fill=["user.name=?"])
    assert [column.name for column in columns] == ["user.name", "user.at.x", "n"]
    np.testing.assert_equal(found, {"user.name": ["a", "?"], "user.at.x": [1.5, np.nan], "n": [1, 2]})
    columns, _ = read(tmp_path, [table], without=["user"])
    assert [column.name for column in columns] == ["n"]
    columns, _ = read(tmp_path, [table], columns=["n,user.at.x"])
    assert [column.name for column in columns] == ["n", "user.at.x"]


def test_files_are_matched_by_name_and_widened(tmp_path: Path) -> None:
    first = pa.table({"a": pa.array([1], pa.int8()), "b": ["x"], "c": [1]})
    second = pa.table({"c": [0.5], "b": ["y"], "a": pa.array([300], pa.int32())})
    columns, found = read(tmp_path, [first, second])
    assert columns == (Column("a", "int32"), Column("b", "str"), Column("c", "float64"))
    assert found == {"a": [1, 300], "b": ["x", "y"], "c": [1.0, 0.5]}


def test_whole_numbers_that_no_float_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="must be float64"):
        read(tmp_path, [pa.table({"a": [2**60 + 1]}), pa.table({"a": [0.5]})])


def test_a_column_that_a_file_lacks_is_named(tmp_path: Path) -> None:
    tables = [pa.table({"a": [1], "x": [1.0]}), pa.table({"a": [2]})]
    with pytest.raises(ColumnProblems, match=r"'x' isn't in .*1\.parquet. Add --fill x=null"):
        read(tmp_path, tables)
    found = read(tmp_path, tables, fill=["x=null"])[1]
    assert found == {"a": [1, 2], "x": [1.0, 0.0], "x_is_null": [False, True]}
    assert read(tmp_path, tables, without=["x"])[1] == {"a": [1, 2]}
    assert read(tmp_path, tables, fill=["x=7"])[1] == {"a": [1, 2], "x": [1.0, 7.0]}
    assert read(tmp_path, tables, drop_nulls=["x"])[1] == {"a": [1], "x": [1.0]}


def test_rows_that_a_condition_leaves_out_may_miss_values(tmp_path: Path) -> None:
    tables = [pa.table({"age": [None, 30, 40], "city": ["Rome", "Oslo", None]})]
    assert read(tmp_path, tables, where="age is not None and age < 35")[1] == {"age": [30], "city": ["Oslo"]}
    with pytest.raises(ColumnProblems, match=r"'city' has no value in a block of rows.*--fill city=null"):
        read(tmp_path, tables, where="age > 35")
    assert read(tmp_path, tables, where="age > 35", fill=["city=Rome"])[1] == {"age": [40], "city": ["Rome"]}


def test_all_problems_come_at_once_and_their_remedies_work(tmp_path: Path) -> None:
    table = pa.table(
        {
            "calls": [1, None],
            "name": ["a", None],
            "tags": [["a"], []],
            "ids": [[1], [2, 3]],
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "y": [0, 1],
        }
    )
    with pytest.raises(ColumnProblems) as caught:
        read(tmp_path, [table])
    assert caught.value.remedy == (
        *("--fill", "calls=null", "--fill", "name=null", "--dtype", "tags=json", "--ragged", "ids"),
        *("--dtype", "map=json"),
    )
    columns, found = read(
        tmp_path, [table], ("ids",), fill=["calls=null", "name=null"], dtype=["tags=json", "map=json"]
    )
    assert [column.name for column in columns] == [
        *("calls", "calls_is_null", "name", "name_is_null", "tags", "ids", "map", "y")
    ]
    assert found["calls"] == [1, 0] and found["calls_is_null"] == [False, True]
    assert found["name"] == ["a", ""] and found["name_is_null"] == [False, True]
    assert found["tags"] == ['["a"]', "[]"] and found["map"] == ['[["k", 1]]', "[]"]
    assert [np.frombuffer(each, np.int64).tolist() for each in found["ids"]] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"fill": ["x=5"]}, [1.0, 5.0, 4.0, 5.0]),
        ({"fill": ["x=mean"]}, [1.0, 2.5, 4.0, 2.5]),
        ({"fill": ["x=most"]}, [1.0, 1.0, 4.0, 1.0]),
        ({"drop_nulls": ["x"]}, [1.0, 4.0]),
        ({"drop_nulls": ["all"]}, [1.0]),
        ({"where": "x > 1"}, [4.0]),
        ({"where": "x > 1 or n == 1", "without": ["n"]}, [1.0, 4.0]),
    ],
)
def test_what_becomes_of_missing_values(tmp_path: Path, options: Any, values: list[float]) -> None:
    x = pa.array([1.0, None, 4.0, float("nan")])
    table = pa.table({"x": x, "n": [1, 2, None, 4]})
    given = {"fill": [], **options}
    given["fill"] = [*given["fill"], "n=0"] if "all" not in options.get("drop_nulls", ()) else given["fill"]
    if "without" in options:
        del given["fill"]
    assert read(tmp_path, [table], **given)[1]["x"] == values


def test_means_are_of_all_files_and_whole_where_the_column_is(tmp_path: Path) -> None:
    tables = [pa.table({"x": [1, None]}), pa.table({"x": [4, 5]})]
    assert read(tmp_path, tables, fill=["x=mean"])[1]["x"] == [1, 3, 4, 5]
    texts = [pa.table({"x": ["a", None]}), pa.table({"x": ["b", "b"]})]
    assert read(tmp_path, texts, fill=["x=most"])[1]["x"] == ["a", "b", "b", "b"]


def test_times_are_filled_and_read_by_a_form(tmp_path: Path) -> None:
    times = pa.table({"x": pa.array([NOON, None], pa.timestamp("ms"))})
    assert read(tmp_path, [times], fill=["x=2020-01-02"])[1]["x"] == [1577966400000, 1577923200000]
    texts = pa.table({"x": ["02.01.2020 12:00"]})
    columns, found = read(tmp_path, [texts], dtype=["x=%d.%m.%Y %H:%M"])
    assert columns[0].logical == "timestamp[us]" and found["x"] == [1577966400000000]
    with pytest.raises(SourceError, match="column 'x', of text, must be timestamp"):
        read(tmp_path, [texts], dtype=["x=%Y"])


def test_what_fills_times_is_read_by_their_form(tmp_path: Path) -> None:
    texts, days = pa.table({"x": ["20200102", None, ""]}), [1577923200000000] * 3
    for fill in ("20200102", "most", "2020-01-02"):
        assert read(tmp_path, [texts], dtype=["x=%Y%m%d"], fill=[f"x={fill}"])[1]["x"] == days
    found = read(tmp_path, [texts], dtype=["x=%Y%m%d"], fill=["x=null"])[1]
    assert found == {"x": [days[0], 0, 0], "x_is_null": [False, True, True]}
    assert read(tmp_path, [texts], dtype=["x=%Y%m%d"], drop_nulls=["x"])[1] == {"x": days[:1]}


def test_dictionaries_may_have_missing_values_themselves(tmp_path: Path) -> None:
    for values, filled in ((["a", None], ["a", "", ""]), ([5, None], [5, 0, 0])):
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(values))
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
            table = pa.table({"x": column})
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        files = [(tmp_path / "a.arrow", "arrow")]
        with pytest.raises(ColumnProblems, match="misses 2 values"):
            open_sources(files, SourceOptions())
        (source,) = open_sources(files, SourceOptions(fields=parse_column_options({"fill": ["x=null"]})))
        (block,) = source.blocks(1 << 20)
        assert list(map(str, block.columns["x"])) == list(map(str, filled))
        assert block.columns["x_is_null"].tolist() == [False, True, True]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_names_of_structs_may_have_dots(tmp_path: Path, format: str) -> None:
    table = pa.table({"x.y": [{"z": 1.5}], "x": [1], "a": [2]})
    if format == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with (
            pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
            pa.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table)
    (source,) = open_sources([(tmp_path / f"a.{format}", format)], SourceOptions())
    (block,) = source.blocks(1 << 20)
    found = {name: values.tolist() for name, values in block.columns.items()}
    assert found == {"x.y.z": [1.5], "x": [1], "a": [2]}


def test_values_within_lists_may_be_missing_if_they_are_floats(tmp_path: Path) -> None:
    table = pa.table({"x": [[1, None], [2, 3]]})
    with pytest.raises(ColumnProblems, match="Add --dtype x=float64"):
        read(tmp_path, [table], drop_nulls=["x"])
    found = read(tmp_path, [table], dtype=["x=float64"])[1]["x"]
    np.testing.assert_array_equal(found, [[1.0, np.nan], [2.0, 3.0]])


def test_what_is_said_of_missing_values_is_done_or_refused(tmp_path: Path) -> None:
    table = pa.table({"x": [[1], None, [2, 3]]})
    assert read(tmp_path, [table], dtype=["x=json"], fill=["x=[]"])[1]["x"] == ["[1]", "[]", "[2, 3]"]
    assert read(tmp_path, [table], dtype=["x=json"])[1]["x"] == ["[1]", "null", "[2, 3]"]
    with pytest.raises(InputError, match="--fill makes empty lists"):
        read(tmp_path, [table], ("x",), fill=["x=7"])
    with pytest.raises(InputError, match="--fill x=most needs one value a row"):
        read(tmp_path, [table], ("x",), fill=["x=most"])
    large = pa.table({"x": [2**62 + 1, None]})
    assert read(tmp_path, [large], fill=["x=mean"])[1]["x"] == [2**62 + 1, 2**62]


def test_numbers_that_narrower_ones_do_not_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is too large for halffloat"):
        read(tmp_path, [pa.table({"x": [70000.0, np.inf]})], dtype=["x=float16"])
    ids = pa.table({"x": pa.array([Decimal(2**53 + 1), None], pa.decimal128(38, 0))})
    with pytest.raises(SourceError, match="9007199254740993 is no number that double holds"):
        read(tmp_path, [ids])
    assert read(tmp_path, [ids], dtype=["x=str"], fill=["x=-"])[1]["x"] == ["9007199254740993", "-"]


def test_dtypes_are_cast_exactly(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 200], "b": ["1.5", "2"], "c": [0, 1], "d": [1.0, 2.0]})
    columns, found = read(
        tmp_path, [table], dtype=["a=str", "b=float32", "c=bool", "d=int16"], rename=["a=zip"]
    )
    assert [(c.name, c.dtype) for c in columns] == [
        *(("zip", "str"), ("b", "float32"), ("c", "bool"), ("d", "int16"))
    ]
    assert found == {"zip": ["1", "200"], "b": [1.5, 2.0], "c": [False, True], "d": [1, 2]}
    with pytest.raises(SourceError, match=r"column 'a', of type int64, must be int8.*200"):
        read(tmp_path, [table], dtype=["a=int8"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": ["ab=%H %Z"]}, "can't have names of zones"),
        ({"columns": ["abc"]}, r"the sources: ab, b. Received: abc. Did you mean 'ab'\?"),
        ({"without": ["z"]}, "--without must name"),
        ({"rename": ["z=y"]}, "--rename must name"),
        ({"rename": ["ab=b"]}, "a name of its own. Received: b twice"),
        ({"fill": ["ab=x"]}, "--fill needs a value of the column's type. Received: ab=x for int64"),
        ({"fill": ["ab=300"], "dtype": ["ab=int8"]}, "--fill needs a value"),
        ({"fill": ["b=mean"]}, "b=mean is for numbers"),
        ({"drop_nulls": ["z"]}, "--drop-nulls must name"),
        ({"where": "z > 1"}, "Received: z"),
        ({"without": ["ab", "b"]}, "no columns that are kept"),
    ],
)
def test_options_that_name_nothing_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises((InputError, SourceError), match=message):
        read(tmp_path, [pa.table({"ab": [1], "b": ["x"]})], **options)


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    for year, rows in ((2020, [1]), (2021, [2, 3])):
        (tmp_path / f"year={year}" / "city=New%20York").mkdir(parents=True)
        pq.write_table(pa.table({"x": rows}), tmp_path / f"year={year}" / "city=New%20York" / "a.parquet")
    columns, found = read(tmp_path, [])
    assert columns == (Column("x", "int64"), Column("year", "int64"), Column("city", "str"))
    assert found == {"x": [1, 2, 3], "year": [2020, 2021, 2021], "city": ["New York"] * 3}


@pytest.mark.parametrize(
    ("values", "options", "dtype", "expected"),
    [
        (["1", "20"], {}, "int64", [1, 20]),
        (["1.5", "2"], {}, "float64", [1.5, 2.0]),
        (["01", "10"], {}, "str", ["01", "10"]),
        (["01", "10"], {"where": 'k == "10"'}, "str", ["10"]),
        (["01", "10"], {"dtype": ["k=int64"]}, "int64", [1, 10]),
        (["1.50", "2"], {}, "str", ["1.50", "2"]),
        (["2024-05-01"], {"dtype": ["k=date"]}, "int64", [19844]),
        (["1", "__HIVE_DEFAULT_PARTITION__"], {"fill": ["k=-1"]}, "int64", [1, -1]),
        (["1", "__HIVE_DEFAULT_PARTITION__"], {"where": "k < 2", "fill": ["k=0"]}, "int64", [1]),
        (["01", "__HIVE_DEFAULT_PARTITION__"], {"fill": ["k=?"]}, "str", ["01", "?"]),
    ],
)
def test_names_of_folders_have_one_type(
    tmp_path: Path, values: list[str], options: Any, dtype: str, expected: list[Any]
) -> None:
    for value in values:
        (tmp_path / f"k={value}").mkdir()
        pq.write_table(pa.table({"x": [0]}), tmp_path / f"k={value}" / "a.parquet")
    columns, found = read(tmp_path, [], **options)
    assert columns[1].dtype == dtype and found["k"] == expected


KINDS = st.sampled_from(
    [
        *(pa.int8(), pa.uint16(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.large_string()),
        *(pa.null(), pa.bool_(), pa.date32(), pa.timestamp("s"), pa.timestamp("us"), pa.binary()),
        *(pa.list_(pa.int8()), pa.large_list(pa.float32()), pa.decimal128(5, 2)),
    ]
)


@given(KINDS, KINDS)
def test_widening_does_not_depend_on_the_order_of_files(first: Any, second: Any) -> None:
    assert widen(first, second) == widen(second, first) or {first, second} <= {pa.string(), pa.large_string()}
    wide = widen(first, second)
    if wide is not None:
        assert widen(wide, first) == wide and widen(wide, second) == wide
