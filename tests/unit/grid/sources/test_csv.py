"""What is particular to CSV; `test_sources.py` has what all formats do."""

from __future__ import annotations

import csv
import gzip
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources import ColumnOptions, ColumnProblems, CsvOptions, open_sources
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.csv import CsvTable


def open_table(path: Path, options: SourceOptions) -> Any:
    return open_sources([(path, "csv")], options)[0]


TEXT = "a,b,c,d\n1,1.5,true,2020-01-01\n2,,false,é\n"
COLUMNS = (Column("a", "int64"), Column("b", "float64"), Column("c", "bool"), Column("d", "str"))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_types_follow_from_the_values(tmp_path: Path, name: str):
    data = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = open_table(tmp_path / name, SourceOptions())
    assert source.columns == COLUMNS
    (block,) = source.blocks(1 << 20)
    assert block.rows == 2 and block.source_bytes == (tmp_path / name).stat().st_size
    np.testing.assert_array_equal(block.columns["b"], [1.5, np.nan])
    assert block.columns["d"].to_pylist() == ["2020-01-01", "é"]


def test_a_column_may_be_asked_for_as_float64(tmp_path: Path):
    (tmp_path / "a.csv").write_text(TEXT)
    source = open_table(tmp_path / "a.csv", SourceOptions(fields=ColumnOptions(dtypes={"a": "float64"})))
    assert source.columns == (Column("a", "float64"), *COLUMNS[1:])
    (block,) = source.blocks(1 << 20)
    assert block.columns["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a,é\n1,2\n".encode("latin-1"), "Add --encoding cp1252"),
        (b"\0\1\2\n", "Received: binary data"),
        (b"a,b\n", "no rows below its header"),
        (b"a\n1\n2,3\n", "Row #3: Expected 1 columns, got 2"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, data: bytes, message: str):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        open_table(tmp_path / "a.csv", SourceOptions())


@pytest.mark.parametrize(
    ("header", "row", "names"),
    [
        ("a;b", "1;2", ["a", "b"]),
        ("\ufeffa\tb", "1\t2", ["a", "b"]),
        ('"a,1";b', '1;"2"', ["a,1", "b"]),
        ("a;1,b", "1,2", ["a;1", "b"]),  # a comma wins
        ('"a;b"', "1", ["a;b"]),  # quoted: a name
        ("a", "1", ["a"]),
    ],
)
def test_the_header_tells_what_separates_fields(
    tmp_path: Path, header: str, row: str, names: list[str]
) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n{row}\n")
    assert read(tmp_path / "a.csv", 1 << 20) == [dict(zip(names, (1, 2), strict=False))]


def test_rows_may_begin_behind_what_types_follow_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.sources.csv._BLOCK_BYTES", 8)
    text = "a" * 30
    (tmp_path / "a.csv").write_text(f"t,n\n{text},1\n")
    assert read(tmp_path / "a.csv", 1 << 20) == [{"t": text, "n": 1}]


def test_a_packed_file_that_is_cut_off_is_refused(tmp_path: Path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(TEXT.encode())[:-12])
    with pytest.raises(SourceError, match="can't be unpacked"):
        open_table(tmp_path / "a.csv.gz", SourceOptions())


def read(path: Path, block_bytes: int, start: int = 0) -> list[dict[str, object]]:
    source = open_table(path, SourceOptions())
    rows: list[dict[str, object]] = []
    for block in source.blocks(block_bytes, start):
        columns = {
            name: values.to_pylist() if hasattr(values, "to_pylist") else values.tolist()
            for name, values in block.columns.items()
        }
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.one_of(
            st.sampled_from(['a"b', 'x,"y', "two\nlines", 'a "quoted\r\n" line', "", '"', "\n\n", "plain"]),
            st.text('ab",;\t\n\r', max_size=8),
        ),
        min_size=1,
        max_size=30,
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    by=st.sampled_from([",", ";", "\t"]),
    chunk=st.integers(1, 60),
)
def test_chunks_end_where_rows_do(tmp_path: Path, texts: list[str], end: str, by: str, chunk: int) -> None:
    """Any text that a writer quotes comes back, wherever the file is cut."""
    texts = ["text", *texts]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=by, lineterminator=end, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["n", "t"])
        writer.writerows([[number, text] for number, text in enumerate(texts)])
    expected = [{"n": number, "t": text} for number, text in enumerate(texts)]
    assert read(tmp_path / "a.csv", chunk) == expected


def test_quotes_within_a_field_are_text_and_open_nothing(tmp_path: Path) -> None:
    rows = [('5" pipe', 'say "a,b'), ("x", '"two\nlines" and more'), ('6"', "y")] * 50
    text = "a,b\n" + "".join(f"{a},{b}\n" for a, b in rows).replace('say "a,b', 'say "a')
    (tmp_path / "a.csv").write_text(text)
    for chunk in (1, 50, 1 << 20):
        found = read(tmp_path / "a.csv", chunk)
        assert len(found) == 150 and found[0] == {"a": '5" pipe', "b": 'say "a'}
        assert found[1] == {"a": "x", "b": "two\nlines and more"} and found[149]["a"] == '6"'


def test_reading_begins_again_after_any_block(tmp_path: Path) -> None:
    for name in ("a.csv", "a.csv.gz"):
        data = ("n,t\n" + "".join(f'{n},"line\n{n}"\n' for n in range(200))).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        source = open_table(tmp_path / name, SourceOptions())
        rows = 0
        for block in source.blocks(100):
            rows += block.rows
            assert [row["n"] for row in read(tmp_path / name, 300, block.next_start)] == list(
                range(rows, 200)
            )
        assert rows == 200


@pytest.mark.parametrize("chunk", [1 << 18, 1 << 24])
def test_errors_number_rows_in_the_file(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.grid.sources.csv._CHUNK_BYTES", 1 << 24)
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 600_000 + "1,2,3\n" + "1,2\n" * 50)
    with pytest.raises(SourceError, match="Row #600002: Expected 2 columns, got 3"):
        read(tmp_path / "a.csv", chunk)


def test_a_row_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.sources.csv.MOST_ROW_BYTES", 10_000)
    (tmp_path / "a.csv").write_text("a\nx\n" + "y" * 9000 + '\n"' + "x\n" * 20_000)
    with pytest.raises(SourceError, match=r"a row must have at most 10000 bytes.*from byte 9005 on"):
        list(open_table(tmp_path / "a.csv", SourceOptions()).blocks(1000))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_they_do_anywhere(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.csv").write_bytes(end.join(["", "", "a,b", *(f"{i},x" for i in range(500)), ""]).encode())
    assert [row["a"] for row in read(tmp_path / "a.csv", 64)] == list(range(500))


def read_with(path: Path, **options: Any) -> dict[str, list[Any]]:
    fields = ColumnOptions(dtypes=options.pop("dtypes", {}))
    source = open_table(path, SourceOptions(csv=CsvOptions(**options), fields=fields))
    values: dict[str, list[Any]] = {column.name: [] for column in source.columns}
    for block in source.blocks(64 if path.stat().st_size < 10_000 else 1 << 20):
        for name, each in block.columns.items():
            values[name] += each.to_pylist() if hasattr(each, "to_pylist") else each.tolist()
    return values


@pytest.mark.parametrize(
    ("data", "options", "values"),
    [
        (b"a;b\n1,5;2\n,5;3\n", {}, {"a": [1.5, 0.5], "b": [2, 3]}),
        (b"a;b\n1.5;x,y\n", {}, {"a": [1.5], "b": ["x,y"]}),
        (b"a|b\n1|2\n", {}, {"a": [1], "b": [2]}),
        (b"a b\n1 2\n", {"delimiter": " "}, {"a": [1], "b": [2]}),
        (b"zip,n\n01234,1\n99999,2\n", {}, {"zip": ["01234", "99999"], "n": [1, 2]}),
        (b"zip,n\n01234,1\n", {"dtypes": {"zip": "int64"}}, {"zip": [1234], "n": [1]}),
        (b"1,x\n2,y\n", {"header": False}, {"column_1": [1, 2], "column_2": ["x", "y"]}),
        (b"2019,2020\n1,2\n", {"header": True}, {"2019": [1], "2020": [2]}),
        (b",a\n0,x\n1,y\n", {}, {"column_1": [0, 1], "a": ["x", "y"]}),
        ("name\nKöln\n".encode("utf-16"), {}, {"name": ["Köln"]}),
        ("name\nKöln\n".encode("cp1252"), {"encoding": "cp1252"}, {"name": ["Köln"]}),
        (b"# made by x\na,b\n1,2\n#3,4\n5,6\n", {"comment": "#"}, {"a": [1, 5], "b": [2, 6]}),
        (b"a,b\n'x,y',1\n", {"quote": "'"}, {"a": ["x,y"], "b": [1]}),
        (b'a,b\n"x,1\n', {"quote": ""}, {"a": ['"x'], "b": [1]}),
        (b"a,b\n-9,x\n1,-9\n", {"null_values": ("-9",), "dtypes": {"a": "float64"}}, None),
        (b"t,d\n2020-01-02 03:04:05,2020-01-02\n", {}, {"t": [1577934245000000], "d": [18263]}),
        (b'"a\nb",c\n1,2\n', {}, {"a\nb": [1], "c": [2]}),
        (b'\n\na,a,"a",a_2,b\n1,2,x,4,5\n', {}, {"a": [1], "a_3": [2], "a_4": ["x"], "a_2": [4], "b": [5]}),
        (b",a,,column_1\n1,2,3,4\n", {}, {"column_1_2": [1], "a": [2], "column_3": [3], "column_1": [4]}),
        (b'"a\nb","a\nb"\n1,x\n', {}, {"a\nb": [1], "a\nb_2": ["x"]}),
    ],
)
def test_how_text_is_divided_is_seen_or_said(
    tmp_path: Path, data: bytes, options: dict[str, Any], values: dict[str, list[Any]] | None
) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    if values is None:
        with pytest.raises(SourceError, match="'b' misses 1 value"):
            read_with(tmp_path / "a.csv", **options)
    else:
        assert read_with(tmp_path / "a.csv", **options) == values


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1,x\n2,y\n", "looks like values, such as 1.*Add --no-header"),
        (b"a;b;c\n1,5;1.5;x\n", "'a' has numbers with a comma before decimals, and b has some with a point"),
        (
            b"n,zip\n1,2\n" + b"1,3\n" * 600_000 + b"1,007\n",
            "'zip' has numbers with leading zeros.*--dtype zip=str",
        ),
        ("a\nKöln\n".encode("cp1252"), "Add --encoding cp1252"),
    ],
)
def test_what_might_be_read_wrongly_is_asked(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(ColumnProblems, match=message):
        read_with(tmp_path / "a.csv")


def test_all_that_is_wrong_with_a_text_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("1,Köln,\n,x,5\n".encode("cp1252"))
    with pytest.raises(ColumnProblems) as caught:
        read_with(tmp_path / "a.csv")
    assert caught.value.remedy == (
        *("--encoding", "cp1252", "--no-header", "--fill", "column_1=null", "--fill", "column_3=null"),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_dialect_gives_the_rows_that_were_written(tmp_path: Path, data: st.DataObject) -> None:
    delimiter = data.draw(st.sampled_from(",;\t|"))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(-(10**6), 10**6), st.text(alphabet="ab,;|\t\"'\nö #", max_size=6)),
            min_size=1,
            max_size=30,
        )
    )
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]))
    path = tmp_path / "a.csv"
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(
            file, delimiter=delimiter, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"]))
        )
        writer.writerow(["number", "text"])
        writer.writerows(rows)
    found = read_with(path, encoding=encoding if encoding == "cp1252" else None)
    assert found["number"] == [number for number, _ in rows]
    assert [str(text) for text in found["text"]] == [text for _, text in rows] or _is_number_like(rows)


def _is_number_like(rows: list[tuple[int, str]]) -> bool:
    """Return whether all texts are empty, which is a column without values."""
    return all(not text.strip() for _, text in rows)


LONG = 2**53 + 1


@pytest.mark.parametrize(
    ("texts", "remedy", "values"),
    [
        ([str(2**64 - 1), "3"], ("--dtype", "id=uint64"), [2**64 - 1, 3]),
        ([str(2**64 + 1), "3"], ("--dtype", "id=str"), [str(2**64 + 1), "3"]),
        (["9" * 5000, "3"], ("--dtype", "id=str"), ["9" * 5000, "3"]),
        ([str(2**63 + 1), "-3"], ("--dtype", "id=str"), [str(2**63 + 1), "-3"]),
        ([str(LONG), "0.5"], ("--dtype", "id=str"), [str(LONG), "0.5"]),
    ],
)
def test_whole_numbers_that_floats_do_not_hold_are_refused(
    tmp_path: Path, texts: list[str], remedy: tuple[str, ...], values: list[Any]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,x\n" + "".join(f"{text},1\n" for text in texts))
    with pytest.raises(ColumnProblems, match="float64 doesn't hold") as caught:
        read_with(path)
    assert caught.value.remedy == remedy
    dtype = remedy[1].partition("=")[2]
    assert read_with(path, dtypes={"id": dtype})["id"] == values
    assert read_with(path, dtypes={"id": "float64"})["id"] == list(map(float, texts))
    (source,) = open_sources([(path, "csv")], SourceOptions(fields=ColumnOptions(without=frozenset({"id"}))))
    assert [column.name for column in source.columns] == ["x"]


def test_floats_in_another_file_change_no_whole_numbers(tmp_path: Path) -> None:
    for name, value in (("a", LONG), ("b", 0.5)):
        (tmp_path / f"{name}.csv").write_text(f"id\n{value}\n")
    files = [(tmp_path / f"{name}.csv", "csv") for name in "ab"]
    first, _ = open_sources(files, SourceOptions())
    with pytest.raises(ColumnProblems, match=r"such as 9007199254740993. Add --dtype id=str"):
        list(first.blocks(1 << 20))


@pytest.mark.parametrize("text", ["0x1F", "0XFFFFFFFFFFFFFFFF", " 007", "'007'", "+0X1"])
def test_what_only_looks_like_whole_numbers_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path, options = tmp_path / "a.csv", {"quote": "'"}
    path.write_text(f"id,x\n{text},1\n{text},2\n")
    assert read_with(path, **options)["id"] == [text.strip("'")] * 2
    monkeypatch.setattr("insitu.grid.sources.csv._BLOCK_BYTES", 8)
    path.write_text("id,x\n" + "1,1\n" * 9 + f"{text},1\n")
    with pytest.raises(ColumnProblems, match="--dtype id=str"):
        read_with(path, **options)
    path.write_text("id,x\n" + ",1\n" * 9 + "007,1\n")
    with pytest.raises(ColumnProblems, match=r"leading zeros.*--dtype id=str"):
        read_with(path, **options)
    path.write_text("id,x\n" + "1,1\n" * 9 + "007,1\n")
    assert read_with(path, dtypes={"id": "int64"})["id"] == [*[1] * 9, 7]


def test_thousands_are_no_decimals(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1,234;x\n12,500;y\n")
    with pytest.raises(ColumnProblems, match="Add --decimal ,"):
        read_with(tmp_path / "a.csv")
    assert read_with(tmp_path / "a.csv", decimal=",")["a"] == [1.234, 12.5]
    assert read_with(tmp_path / "a.csv", decimal=".")["a"] == ["1,234", "12,500"]
    (tmp_path / "a.csv").write_text("a;b\n1,234;x\n0,5;y\n")
    assert read_with(tmp_path / "a.csv")["a"] == [1.234, 0.5]


def test_times_keep_nanoseconds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("t\n1969-12-31 23:59:59.123456789\n")
    assert read_with(tmp_path / "a.csv")["t"] == [-876543211]


@pytest.mark.parametrize(
    ("text", "quote", "values"),
    [
        ('a,b\n5" x,1\n# c,2\ny,2\n', None, ['5" x', "y"]),
        ("a,b\n'x\n# c',1\n# it's\ny,2\n", "'", ["x\n# c", "y"]),
        ('\ufeff# "c\na,b\n"#x",1\ny,2\n# end', None, ["#x", "y"]),
        ('a,b\n"x,1\n# c\ny,2\n', "", ['"x', "y"]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 12, 1 << 20])
def test_comments_are_left_out(
    tmp_path: Path, text: str, quote: str | None, values: list[str], chunk: int
) -> None:
    (tmp_path / "a.csv").write_text(text)
    source = open_table(tmp_path / "a.csv", SourceOptions(csv=CsvOptions(comment="#", quote=quote)))
    assert [each for block in source.blocks(chunk) for each in block.columns["a"].to_pylist()] == values


def test_reading_begins_again_in_other_encodings(tmp_path: Path) -> None:
    for encoding in ("cp1252", "utf-16"):
        path = tmp_path / f"{encoding}.csv"
        path.write_bytes(("n,t\n" + "".join(f"{n},{'é' * 9}\n" for n in range(200))).encode(encoding))
        source = open_table(path, SourceOptions(csv=CsvOptions(encoding=encoding)))
        rows = 0
        for block in source.blocks(100):
            rows += block.rows
            following = [each for more in source.blocks(300, block.next_start) for each in more.columns["n"]]
            assert following == list(range(rows, 200))
        assert rows == 200


def test_columns_of_folders_need_no_others(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.csv").write_text("x\n1\n2\n")
    source = open_table(
        tmp_path / "year=2024" / "a.csv", SourceOptions(fields=ColumnOptions(columns=("year",)))
    )
    assert [block.columns["year"].tolist() for block in source.blocks(1 << 20)] == [[2024, 2024]]


@pytest.mark.parametrize("field", ["01", "-01", "+01", " 01", "'-01'", "-0x1"])
def test_leading_zeros_are_seen_behind_signs_and_dates_take_no_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    reads: list[object] = []
    read = CsvTable._read

    def count(table: CsvTable, text: bytes, types: object, is_behind_header: bool) -> object:
        reads.append(types)
        return read(table, text, types, is_behind_header)  # type: ignore[arg-type]

    monkeypatch.setattr(CsvTable, "_read", count)
    row = "{},2020-01-02,2020-01-02 00:01:02,3\n"
    lines = "id,day,at,n\n" + row.format(7) * 3
    (tmp_path / "dates.csv").write_text(lines)
    CsvTable(tmp_path / "dates.csv", SourceOptions())
    assert len(reads) == 1
    (tmp_path / "zeros.csv").write_text(lines + row.format(field).replace("'", '"'))
    CsvTable(tmp_path / "zeros.csv", SourceOptions())
    assert len(reads) > 2, "the first rows were looked at as text, too"


def test_a_name_that_is_there_twice_gets_a_number_and_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,a\n" + "".join(f"{n},x,{n}.5\n" for n in range(50)))
    (source,) = open_sources([(tmp_path / "a.csv", "csv")], SourceOptions())
    assert source.notes == ("column 3, another a, is a_2",)
    found = read_with(tmp_path / "a.csv")
    assert list(found) == ["a", "b", "a_2"] and found["a"] == [*range(50)]
    assert found["a_2"] == [n + 0.5 for n in range(50)]
    only = SourceOptions(fields=ColumnOptions(columns=("a_2",)))
    (source,) = open_sources([(tmp_path / "a.csv", "csv")], only)
    assert [v for block in source.blocks(64) for v in block.columns["a_2"]] == found["a_2"]


def test_errors_number_rows_below_names_that_are_there_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,a\n1,2\n3,4,5\n")
    with pytest.raises(SourceError, match="Row #3: Expected 2 columns, got 3"):
        open_table(tmp_path / "a.csv", SourceOptions())


GERMAN = ["1.234,50", "5,00", "-1.000.000,25", "12"]
AMERICAN = ["1,234.50", "5.00", "-1,000,000.25", "12"]


@pytest.mark.parametrize(
    ("texts", "dtype", "thousands", "decimal"),
    [
        (GERMAN, "float64", ".", ","),
        (AMERICAN, "float64", ",", "."),
        (["1,234", "12,345,678", "-5", "+7"], "int64", ",", "."),
        (["1.234,00", "5,0"], "int64", ".", ","),
        (["1,5", "0,123"], "float64", ".", ","),
        (["1,234,567", "12"], "float32", ",", "."),
    ],
)
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_numbers_with_thousands_are_read_as_they_are_given(
    tmp_path: Path, texts: list[str], dtype: str, thousands: str, decimal: str, delimiter: str
) -> None:
    path = tmp_path / "a.csv"
    texts = texts * 50
    path.write_text(f"x{delimiter}y\n" + "".join(f'"{text}"{delimiter}a\n' for text in texts))
    plain = [float(text.replace(thousands, "").replace(decimal, ".")) for text in texts]
    assert read_with(path, dtypes={"x": dtype})["x"] == np.array(plain).astype(dtype).tolist()


@pytest.mark.parametrize("pair", [("yes", "no"), ("Y", "N"), ("t", "F"), ("TrUe", "false"), ("1", "No")])
def test_words_are_bools_if_they_are_given_as_such(tmp_path: Path, pair: tuple[str, str]) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{pair[n % 2]},a\n" for n in range(99)))
    assert read_with(tmp_path / "a.csv", dtypes={"x": "bool"})["x"] == [n % 2 == 0 for n in range(99)]


@pytest.mark.parametrize(
    ("texts", "option"),
    [
        (GERMAN, "--dtype 'a b=float64' makes numbers"),
        (AMERICAN, "--dtype 'a b=float64' makes numbers"),
        (["1,234", "2,500"], "--dtype 'a b=int64' makes numbers"),
        (["31.12.2020", "1.2.2021", ""], "--dtype 'a b=%d.%m.%Y' makes times"),
        (["12/31/2020"], "--dtype 'a b=%m/%d/%Y' makes times"),
        (["31/12/20 10:30"], "--dtype 'a b=%d/%m/%y %H:%M' makes times"),
        (["3/4/2020"], "--dtype 'a b=%d/%m/%Y' or --dtype 'a b=%m/%d/%Y' makes times"),
        (["yes", "No", ""], "--dtype 'a b=bool' makes bools"),
        (["T", "f"], "--dtype 'a b=bool' makes bools"),
        (["yes", "maybe"], ""),
        (["yes"], ""),
        (["1,000"], ""),
        (["007", "1,234"], ""),
        (["1.2.3", "1.10.2"], ""),
        (["31.13.2020"], ""),
        (["5 Main St", "1,234"], ""),
    ],
)
def test_text_that_looks_like_other_values_gets_a_note(tmp_path: Path, texts: list[str], option: str) -> None:
    (tmp_path / "a.csv").write_text("a b,y\n" + "".join(f'"{text}",1\n' for text in texts))
    (source,) = open_sources([(tmp_path / "a.csv", "csv")], SourceOptions())
    assert source.notes == ((f"a b: text such as {texts[0]}; {option} of it",) if option else ())
    for said in shlex.split(option)[1:2]:
        name, _, dtype = said.partition("=")
        filled = SourceOptions(fields=ColumnOptions(dtypes={name: dtype}, fills={name: "0"}))
        (source,) = open_sources([(tmp_path / "a.csv", "csv")], filled)
        assert sum(block.rows for block in source.blocks(1 << 20)) == len(texts)
    left_out = SourceOptions(fields=ColumnOptions(without=frozenset({"a b"})))
    (source,) = open_sources([(tmp_path / "a.csv", "csv")], left_out)
    assert not source.notes


def test_all_columns_that_are_not_as_they_are_given_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = ['1,1,2020-01-01,"1,5",true,1,20200102', '300,2.5,31.12.2020,"x\ny",5,2,20200103']
    path.write_text("\na,b,c,d,e,f,g\n" + "\n".join(rows) + "\n")
    dtypes = {"a": "uint8", "b": "int64", "c": "date", "d": "float64", "e": "bool", "f": "int8", "g": "date"}
    with pytest.raises(ColumnProblems) as caught:
        read_with(path, dtypes=dtypes)
    assert list(map(str, caught.value.problems)) == [
        "column 'a' is given as uint8, and has '300' in line 4",
        "column 'b' is given as int64, and has '2.5' in line 4",
        "column 'c' is given as date, and has '31.12.2020' in line 4",
        "column 'd' is given as float64, and has 'x\\ny' in line 4",
        "column 'e' is given as bool, and has '5' in line 4",
        "column 'g' is given as date, and has '20200102' in line 3",
    ]
    advised = dict(each.partition("=")[::2] for each in caught.value.remedy[1::2])
    assert advised == {"a": "int64", "b": "float64", "c": "str", "d": "str", "e": "str", "g": "%Y%m%d"}
    assert read_with(path, dtypes=dtypes | advised)["a"] == [1, 300]
    path.write_text("c,d\n31.12.2020,1\n01.02.2021,x\n")
    with pytest.raises(ColumnProblems, match=r"line 2.*Add --dtype c=%d\.%m\.%Y"):
        read_with(path, dtypes={"c": "timestamp"})
    with pytest.raises(ColumnProblems, match=r"given as %m/%d/%Y.*'31.12.2020' in line 2.*c=%d.%m.%Y"):
        read_with(path, dtypes={"c": "%m/%d/%Y"})
    kept = SourceOptions(fields=ColumnOptions(dtypes={"c": "%m/%d/%Y"}, without=frozenset({"c"})))
    (source,) = open_sources([(path, "csv")], kept)
    assert [column.name for column in source.columns] == ["d"]


def test_thousands_that_may_be_decimals_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('x,y\n"1,000",a\n"2,500",b\n')
    message = r"1,000 may group thousands \(--decimal \.\) or have decimals \(--decimal ,\). Add --decimal \."
    with pytest.raises(ColumnProblems, match=message):
        read_with(path, dtypes={"x": "float64"})
    assert read_with(path, dtypes={"x": "float64"}, decimal=".")["x"] == [1000, 2500]
    assert read_with(path, dtypes={"x": "float64"}, decimal=",")["x"] == [1, 2.5]
    path.write_text("x,y\n,a\n1.000,b\n")
    with pytest.raises(ColumnProblems, match=r"'1\.000' in line 3;.*Add --dtype x=float64"):
        read_with(path, dtypes={"x": "int64"})
    path.write_text("x,y\n1.000,a\n2.500,b\n")  # no thousands, since they are read as floats
    with pytest.raises(ColumnProblems, match=r"'2\.500' in line 3\. Add --dtype x=float64"):
        read_with(path, dtypes={"x": "int64"})


@pytest.mark.parametrize("has_header", [False, True])
@pytest.mark.parametrize("wrong", [14, 60])
def test_rows_are_counted_alike_in_all_parts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_header: bool, wrong: int
) -> None:
    """From 1, the header among them."""
    monkeypatch.setattr("insitu.grid.sources.csv._BLOCK_BYTES", 20)
    rows = ["1,2\n"] * 99
    rows.insert(wrong - 1, "a,2\n")
    path = tmp_path / "a.csv"
    path.write_text("".join(["x,y\n"] * has_header + rows))
    with pytest.raises(ColumnProblems, match=rf"has 'a' in row #{wrong + has_header}\. "):
        read_with(path, header=has_header)


def test_a_later_value_that_is_not_as_given_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.grid.sources.csv._BLOCK_BYTES", 40)
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + '"1.234,5",yes\n' * 20 + '"1,234.5",no\n')
    with pytest.raises(ColumnProblems, match=r"is given as float64, and has '1,234\.5' in row #22.*x=str"):
        read_with(path, dtypes={"x": "float64"})
    path.write_text("x,y\n" + '"1.234,5",yes\n' * 20 + "1.5,no\n")
    with pytest.raises(ColumnProblems, match=r"has '1\.5' in row #22. Add --dtype x=str"):
        read_with(path, dtypes={"x": "float64"})
    path.write_text("x,y\n" + "1,yes\n" * 20 + "1,maybe\n")
    with pytest.raises(ColumnProblems, match=r"'y' is given as bool, and has 'maybe' in row #22.*y=str"):
        read_with(path, dtypes={"y": "bool"})
    path.write_text("x,y\n" + "true,a\n" * 20 + "5,b\n")
    with pytest.raises(ColumnProblems, match=r"'x' is bool by the first.*x=str"):
        read_with(path)
