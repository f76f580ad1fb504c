"""What is particular to Parquet; `test_sources.py` has what all formats do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources import open_sources
from insitu.grid.sources.base import SourceOptions


def open_table(path: Path, options: SourceOptions) -> Any:
    return open_sources([(path, "parquet")], options)[0]


def test_rows_of_all_row_groups_come_in_order(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(100)), "name": [f"row {i}" for i in range(100)]}), path, 30)
    source = open_table(path, SourceOptions())
    assert source.columns == (Column("x", "int64"), Column("name", "str"))
    blocks = list(source.blocks(200))
    assert len(blocks) > 4 and blocks[-1].source_bytes == path.stat().st_size
    assert [x for block in blocks for x in block.columns["x"]] == list(range(100))
    assert blocks[-1].columns["name"].to_pylist()[-1] == "row 99"


def test_a_file_without_rows_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="has no rows"):
        open_table(tmp_path / "a.parquet", SourceOptions())


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(100))}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match="can't be read"):
        open_table(path, SourceOptions())
