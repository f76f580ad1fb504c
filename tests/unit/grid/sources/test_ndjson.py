"""What is particular to JSON lines; `test_sources.py` has what all formats do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import Column
from insitu.grid import import_cache
from insitu.grid.sources import ColumnOptions, ColumnProblems, open_sources
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.drawings import Strokes, render
from insitu.grid.sources.ndjson import _SAMPLE_BYTES


def open_table(path: Path, options: SourceOptions) -> Any:
    return open_sources([(path, "ndjson")], options)[0]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def read(path: Path, block_bytes: int = 1 << 20, start: int = 0, **options: Any) -> dict[str, list[Any]]:
    source = open_table(path, SourceOptions(**options))
    found: dict[str, list[Any]] = {column.name: [] for column in source.columns}
    for block in source.blocks(block_bytes, start):
        for name, values in block.columns.items():
            found[name].extend(values.to_pylist() if hasattr(values, "to_pylist") else values.tolist())
    return found


ROWS = [
    {
        "i": i,
        "f": i / 2,
        "flag": i % 2 == 0,
        "when": "2017-03-01 20:41:36.70725 UTC",
        "v": [i, 1],
    }
    for i in range(300)
]


@pytest.mark.parametrize("name", ["a.ndjson", "a.jsonl.gz"])
@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_scalars_and_lists_are_columns(tmp_path: Path, name: str, block_bytes: int):
    path = write(tmp_path / name, ROWS)
    source = open_table(path, SourceOptions())
    assert source.columns == (
        Column("i", "int64"),
        Column("f", "float64"),
        Column("flag", "bool"),
        Column("when", "str"),
        Column("v", "int64", (2,)),
    )
    assert source.expected_rows == 300
    found = read(path, block_bytes)
    assert [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)] == ROWS
    blocks = list(source.blocks(block_bytes))
    rest = read(path, block_bytes, blocks[0].next_start)
    assert rest["i"] == list(range(blocks[0].rows, 300))


def test_times_in_the_form_of_iso_are_times(tmp_path: Path):
    path = write(tmp_path / "a.ndjson", [{"day": "2020-01-01"}, {"day": "2020-01-02T03:04:05"}])
    assert open_table(path, SourceOptions()).columns == (Column("day", "int64", (), "timestamp[s]"),)
    assert read(path, 1)["day"] == [1577836800, 1577934245]
    texts = SourceOptions(fields=ColumnOptions(dtypes={"day": "str"}))
    (block,) = open_table(path, texts).blocks(1 << 20)
    assert block.columns["day"].to_pylist() == ["2020-01-01", "2020-01-02T03:04:05"]


@pytest.mark.parametrize(
    "zoned", ["2020-01-01T01:00:00+01:00", "2020-01-01T01:00Z", "2020-01-01T01:00:00-0130"]
)
@pytest.mark.parametrize("naive", ["2020-01-01T01:00:00", "2020-01-01 01:00", "2020-01-01"])
def test_a_zone_that_comes_or_ends_behind_the_first_lines_is_named(tmp_path: Path, zoned: str, naive: str):
    for first, late in ((zoned, naive), (naive, zoned)):
        path = tmp_path / "late.ndjson"
        lines = [f'{{"t": "{each}", "note": "+49 30"}}\n' for each in (first, late)]
        path.write_text(lines[0] * (_SAMPLE_BYTES // len(lines[0]) + 1) + lines[1])
        with pytest.raises(SourceError, match=r"'t' has times with a zone and others.*Add --dtype t=str"):
            read(path, _SAMPLE_BYTES)
        path.write_text(lines[0] * (_SAMPLE_BYTES // len(lines[0]) + 9))
        assert len(set(read(path, _SAMPLE_BYTES)["t"])) == 1


def test_times_with_a_zone_are_in_utc_and_a_mixture_is_named(tmp_path: Path):
    zoned = write(tmp_path / "a.ndjson", [{"t": "2020-01-01T01:00:00+01:00"}, {"t": "2020-01-01T00:00:00Z"}])
    assert open_table(zoned, SourceOptions()).columns[0].logical == "timestamp[s, tz=UTC]"
    assert read(zoned, 1)["t"] == [1577836800, 1577836800]
    rows = [{"t": "2020-01-01T01:00:00+01:00", "n": None}, {"t": "2020-01-01T00:00:00", "n": 1}]
    mixed = write(tmp_path / "b.ndjson", rows)
    with pytest.raises(SourceError, match=r"'t' has times with a zone and others.*Add --dtype t=str"):
        open_table(mixed, SourceOptions())


def test_keys_in_another_order_missing_numbers_and_empty_lines(tmp_path: Path):
    path = tmp_path / "a.ndjson"
    path.write_text('\n{"x": 1.5, "t": "a"}\n\n{"t": "b", "x": null}\r\n{"t": "c"}')
    found = read(path)
    assert found["t"] == ["a", "b", "c"] and found["x"][0] == 1.5 and np.isnan(found["x"][1:]).all()


def test_whole_numbers_give_way_to_others_in_further_files(tmp_path: Path):
    paths = [write(tmp_path / "a.ndjson", [{"x": 1}]), write(tmp_path / "b.ndjson", [{"x": 1.5}])]
    opened = open_sources([(path, "ndjson") for path in paths], SourceOptions())
    assert [source.columns for source in opened] == [(Column("x", "float64"),)] * 2


def test_lists_of_any_length(tmp_path: Path):
    path = write(tmp_path / "a.ndjson", [{"x": [1, 2]}, {"x": []}, {"x": [3]}])
    source = open_table(path, SourceOptions(ragged_columns=frozenset({"x"})))
    assert source.columns == (Column("x", "int64[*]"),)
    with pytest.raises(SourceError, match="--ragged x"):
        list(open_table(path, SourceOptions()).blocks(1 << 20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n", "a JSON object on each line"),
        ('{"x": 1}\n{"x": 1\n', "a.ndjson: JSON parse error"),
        ('{"x": 1}\n{"x": "a"}\n', "Add --dtype x=str"),
        ('{"x": ' + "[" * 100 + "]" * 100 + "}\n", "may be 64 deep"),
        ('{"x": ' + "[\n" * 100 + "]\n" * 100 + "}\n", "may be 64 deep"),
        ('{"y": "' + "]" * 100 + '", "x": ' + "[" * 100 + "]" * 100 + "}\n", "may be 64 deep"),
        ('{"y": "\\"' + "]" * 100 + '", "x": ' + "[" * 100 + "]" * 100 + "}\n", "may be 64 deep"),
        ("\n\n", "no lines"),
        ('{"x": 1}\n{}\n', "misses 1 value"),
    ],
)
def test_what_makes_no_columns_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "a.ndjson"
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        list(open_table(path, SourceOptions()).blocks(1 << 20))


@pytest.mark.parametrize("line", ['{"x": "a"}', '{"x": 1, "y": 2}', '{"x": ' + "[" * 5000 + "}", '{"x": 1'])
def test_a_later_row_that_doesnt_fit_is_named(tmp_path: Path, line: str):
    rows = [{"x": i, "pad": "p" * 5000} for i in range(900)]
    path = write(tmp_path / "a.ndjson", rows)
    with path.open("a") as file:
        file.write(line[:-1] + ', "pad": ""}\n' if line.endswith("}") else line + "\n")
    source = open_table(path, SourceOptions())
    with pytest.raises(
        SourceError,
        match=r"a\.ndjson(: JSON parse error| can't be imported).*( in row 900|, in the lines from byte \d+)",
    ):
        list(source.blocks(1 << 20))


def test_a_truncated_packed_file_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.ndjson.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match="can't be unpacked"):
        list(open_table(path, SourceOptions()).blocks(1 << 20))


CAT = [[[0, 100, 255], [0, 50, 7]], [[9], [9]]]
DRAWINGS = [
    {"word": "cat", "recognized": True, "key_id": "5201136883597312", "drawing": CAT},
    {"word": "dog", "recognized": False, "key_id": "4", "drawing": [[[1, 2], [3, 4], [0, 17.5]]]},
    {"word": "dog", "recognized": False, "key_id": "5", "drawing": []},
]


def test_drawings_become_images(tmp_path: Path):
    path = write(tmp_path / "a.ndjson", DRAWINGS)
    (source,) = open_sources([(path, "ndjson")], SourceOptions(render=28))
    assert source.columns[-1] == Column("drawing", "uint8", (28, 28))
    (block,) = source.blocks(1 << 20)
    expected = render(
        Strokes(
            np.array([0.0, 100, 255, 9]), np.array([0.0, 50, 7, 9]), np.array([0, 3, 4]), np.array([0, 2])
        ),
        28,
    )
    np.testing.assert_array_equal(block.columns["drawing"][:1], expected)
    assert block.columns["drawing"][2].sum() == 0
    assert block.columns["word"].to_pylist() == ["cat", "dog", "dog"]
    (cache,) = import_cache(Paths(tmp_path / "home"), "draw", [str(path)], render=28, partitions=1)
    assert cache.rows == 3


@pytest.mark.parametrize(
    ("drawing", "message"),
    [
        ([[[1, 2]]], "a list of x coordinates"),
        ([[[1, 2], [1]]], "a list of x coordinates"),
        (None, "each object needs a 'drawing'"),
        ([[[1], None]], "each object needs a 'drawing'"),
        ([[[None], [1]]], "coordinates of 'drawing' are numbers"),
        ([[["a"], [1]]], "JSON parse error"),
        ("x", "JSON parse error"),
    ],
)
def test_what_is_no_drawing_is_refused(tmp_path: Path, drawing: Any, message: str):
    path = write(tmp_path / "a.ndjson", [{"drawing": CAT}, {"drawing": drawing}])
    with pytest.raises(SourceError, match=message):
        list(open_sources([(path, "ndjson")], SourceOptions(render=28))[0].blocks(1 << 20))


def test_rendering_is_asked_for_where_there_are_drawings(tmp_path: Path):
    with pytest.raises(SourceError, match="Add --render 28"):
        open_table(write(tmp_path / "a.ndjson", DRAWINGS), SourceOptions())
    with pytest.raises(SourceError, match="with the keys x"):
        open_table(write(tmp_path / "b.ndjson", [{"x": 1}]), SourceOptions(render=28))
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(InputError, match="--render makes images"):
        import_cache(Paths(tmp_path / "home"), "a", [str(tmp_path / "a.npy")], render=28)


def test_brackets_in_texts_are_not_counted(tmp_path: Path):
    path = tmp_path / "a.ndjson"
    path.write_text('{"x": "[[ \\" {{", "y": 1}\n' * 100 + '{"x": "]] \\\\", "y": 1}\n' * 100)
    assert [column.name for column in open_table(path, SourceOptions()).columns] == ["x", "y"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_passed_over(name: str, tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + b"".join(b'{"i": %d}\n' % i for i in range(100))
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for block_bytes in (1, 50, 1 << 20):
        assert read(tmp_path / name, block_bytes) == {"i": list(range(100))}
    source = open_table(tmp_path / name, SourceOptions())
    first = next(source.blocks(50))
    assert read(tmp_path / name, 50, first.next_start)["i"] == list(range(first.rows, 100))


def test_whole_numbers_that_floats_do_not_hold_are_refused(tmp_path: Path) -> None:
    path, long = tmp_path / "a.jsonl", 2**53 + 1
    write(path, [{"id": 2**64 - 1, "user": {"ids": [long, 0.5]}}, {"id": 3, "user": {"ids": [1, 2]}}])
    with pytest.raises(ColumnProblems) as caught:
        read(path)
    assert caught.value.remedy == ("--dtype", "id=uint64", "--dtype", "user.ids=float64")
    dtypes = {"id": "uint64", "user.ids": "float64"}
    found = read(path, fields=ColumnOptions(dtypes=dtypes))
    assert found == {"id": [2**64 - 1, 3], "user.ids": [[float(long), 0.5], [1, 2]]}
    write(path, [{"id": 2**64}, {"id": -3}])
    assert read(path, fields=ColumnOptions(dtypes={"id": "str"})) == {"id": [str(2**64), "-3"]}
    write(path, [{"id": long}])
    write(tmp_path / "b.jsonl", [{"id": 0.5}])
    first, _ = open_sources([(path, "ndjson"), (tmp_path / "b.jsonl", "ndjson")], SourceOptions())
    with pytest.raises(ColumnProblems, match=r"such as 9007199254740993. Add --dtype id=str"):
        list(first.blocks(1 << 20))
    write(path, [{"id": 1e300}, {"id": 2.0**60}])
    assert read(path) == {"id": [1e300, 2.0**60]}


def test_a_column_of_lists_may_have_no_values_in_one_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"x": None, "n": 1}])
    write(tmp_path / "b.jsonl", [{"x": [1, 2], "n": 2}])
    options = SourceOptions(fields=ColumnOptions(drop_nulls=("x",)))
    files = [(tmp_path / f"{name}.jsonl", "ndjson") for name in "ab"]
    found = [block for source in open_sources(files, options) for block in source.blocks(1 << 20)]
    assert [block.columns["x"].tolist() for block in found] == [[[1, 2]]]


@pytest.mark.parametrize(
    ("late", "remedy", "given", "found"),
    [
        ({"a": 1.5}, ("--dtype", "a=float64"), {"dtypes": {"a": "float64"}}, 1.5),
        ({"a": "x"}, ("--dtype", "a=str"), {"dtypes": {"a": "str"}}, "x"),
        ({"a": True}, ("--dtype", "a=str"), {"dtypes": {"a": "str"}}, "true"),
        ({"a": [1, "ö"]}, ("--dtype", "a=str"), {"dtypes": {"a": "str"}}, '[1, "ö"]'),
        ({"a": 1 << 63}, ("--dtype", "a=uint64"), {"dtypes": {"a": "uint64"}}, 1 << 63),
        ({"a": -(1 << 63) - 1}, ("--dtype", "a=float64"), {"dtypes": {"a": "float64"}}, -float(1 << 63)),
    ],
)
def test_the_option_that_takes_a_later_value_is_named(
    tmp_path: Path, late: dict[str, Any], remedy: tuple[str, ...], given: dict[str, Any], found: Any
) -> None:
    first = _SAMPLE_BYTES // 8
    path = write(tmp_path / "a.ndjson", [{"a": 1}] * first + [late])
    with pytest.raises(ColumnProblems, match=rf"column 'a' .* in row {first}, counted from 0") as caught:
        read(path)
    assert caught.value.remedy == remedy
    assert read(path, fields=ColumnOptions(**given))["a"][-1] == found


def test_a_key_that_comes_late_is_declared(tmp_path: Path) -> None:
    first = _SAMPLE_BYTES // 8
    path = write(tmp_path / "a.ndjson", [{"a": {"i": 1}}] * first + [{"a": {"i": 2, "k": 3}, "f": 0.5}])
    with pytest.raises(ColumnProblems, match=rf"column 'a.k' isn't in the first .* row {first}") as caught:
        read(path)
    assert caught.value.remedy == ("--dtype", "a.k=int64", "--fill", "a.k=null")
    found = read(path, fields=ColumnOptions(dtypes={"a.k": "int64", "f": "float32"}, fills={"a.k": "null"}))
    assert found["a.k"][-2:] == [0, 3] and found["a.k_is_null"][-2:] == [True, False]
    assert np.isnan(found["f"][-2]) and found["f"][-1] == 0.5
    with pytest.raises(InputError, match="--dtype must name a column"):
        read(path, fields=ColumnOptions(dtypes={"nowhere": "float32"}))


def test_values_of_several_types_are_text_if_that_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", [{"a": 1, "b": {"c": 2}}, {"a": "x", "b": {"c": [1]}}, {"a": None}])
    with pytest.raises(ColumnProblems, match="'a' has a number and then a string in row 1") as caught:
        read(path)
    assert caught.value.remedy == ("--dtype", "a=str")
    fields = ColumnOptions(dtypes={"a": "str", "b.c": "str"}, fills={"a": "", "b.c": "null"})
    found = read(path, fields=fields)
    assert found["a"] == ["1", "x", ""] and found["b.c"] == ["2", "[1]", ""]


@pytest.mark.parametrize("line", ['{"a": 1', '{"a": 1, "a": 2}', '{"a":\n2}', '["a"]'])
def test_no_line_is_lost_when_values_become_text(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.ndjson"
    path.write_text('{"a": 1}\n{"a": "x"}\n' + line + "\n")
    with pytest.raises(SourceError):
        read(path, fields=ColumnOptions(dtypes={"a": "str"}))


def test_the_option_for_long_numbers_beside_decimals_works(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ndjson", [{"b": (1 << 53) + 1}, {"b": 1.5}])
    with pytest.raises(ColumnProblems, match="float64 doesn't hold") as caught:
        read(path)
    assert caught.value.remedy == ("--dtype", "b=float64")
    assert read(path, fields=ColumnOptions(dtypes={"b": "float64"}))["b"] == [float(1 << 53), 1.5]
