"""What is particular to CSV; `test_sources.py` has what all formats do."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.csv import CsvSource

TEXT = "a,b,c,d\n1,1.5,true,2020-01-01\n2,,false,é\n"
COLUMNS = (Column("a", "int64"), Column("b", "float64"), Column("c", "bool"), Column("d", "str"))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_types_follow_from_the_values(tmp_path: Path, name: str):
    data = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = CsvSource(tmp_path / name, SourceOptions())
    assert source.columns == COLUMNS
    (block,) = source.blocks(1 << 20)
    assert block.rows == 2 and block.source_bytes == (tmp_path / name).stat().st_size
    np.testing.assert_array_equal(block.columns["b"], [1.5, np.nan])
    assert block.columns["d"].to_pylist() == ["2020-01-01", "é"]


def test_a_column_may_be_asked_for_as_float64(tmp_path: Path):
    (tmp_path / "a.csv").write_text(TEXT)
    source = CsvSource(tmp_path / "a.csv", SourceOptions(float_columns=frozenset({"a", "z"})))
    assert source.columns == (Column("a", "float64"), *COLUMNS[1:])
    (block,) = source.blocks(1 << 20)
    assert block.columns["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a\n1\n".encode("utf-16"), "the mark of UTF-16"),
        ("a,é\n1,2\n".encode("latin-1"), "iconv -f LATIN1"),
        (b"\0\1\2\n", "Received: binary data"),
        (b"a,a\n1,2\n", "each column needs a name of its own"),
        (b"a,b\n", "no rows below its header"),
        (b"a\n1\n2,3\n", "Row #3: Expected 1 columns, got 2"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, data: bytes, message: str):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        CsvSource(tmp_path / "a.csv", SourceOptions())


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
        CsvSource(tmp_path / "a.csv.gz", SourceOptions())


def read(path: Path, block_bytes: int, start: int = 0) -> list[dict[str, object]]:
    source = CsvSource(path, SourceOptions())
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
        source = CsvSource(tmp_path / name, SourceOptions())
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
        list(CsvSource(tmp_path / "a.csv", SourceOptions()).blocks(1000))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_they_do_anywhere(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.csv").write_bytes(end.join(["", "", "a,b", *(f"{i},x" for i in range(500)), ""]).encode())
    assert [row["a"] for row in read(tmp_path / "a.csv", 64)] == list(range(500))
