"""What is particular to CSV; `test_sources.py` has what all formats do."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from insitu.errors import SourceError
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.csv import CsvSource
from insitu.spec import Column

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
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, data: bytes, message: str):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        CsvSource(tmp_path / "a.csv", SourceOptions())


def test_a_packed_file_that_is_cut_off_is_refused(tmp_path: Path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(TEXT.encode())[:-12])
    with pytest.raises(SourceError, match="can't be unpacked"):
        CsvSource(tmp_path / "a.csv.gz", SourceOptions())
