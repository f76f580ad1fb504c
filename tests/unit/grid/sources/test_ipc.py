"""What is particular to Arrow IPC; `test_sources.py` has what all formats do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources import open_sources
from insitu.grid.sources.base import SourceOptions


def open_table(path: Path, options: SourceOptions) -> Any:
    return open_sources([(path, "arrow")], options)[0]


SCHEMA = pa.schema([("x", pa.int64())])


def write(path: Path, *batches: list[int]) -> Path:
    """Write each list of numbers as a batch, in the format that the suffix names."""
    new = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    with new(str(path), SCHEMA) as writer:
        for values in batches:
            writer.write_batch(pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA))
    return path


@pytest.mark.parametrize("name", ["a.arrow", "a.arrows"])
def test_both_formats_give_all_batches_in_order(tmp_path: Path, name: str):
    path = write(tmp_path / name, [], [0, 1, 2], [], [3, 4])
    source = open_table(path, SourceOptions())
    assert source.columns == (Column("x", "int64"),)
    blocks = [(block.rows, block.columns["x"].tolist(), block.source_bytes) for block in source.blocks(16)]
    assert [(rows, values) for rows, values, _ in blocks] == [(2, [0, 1]), (1, [2]), (2, [3, 4])]
    reached = [place for *_, place in blocks]
    assert reached == sorted(reached) and reached[-1] <= path.stat().st_size


@pytest.mark.parametrize("name", ["a.arrow", "a.arrows"])
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str):
    with pytest.raises(SourceError, match="has no rows"):
        open_table(write(tmp_path / name, []), SourceOptions())


def test_the_first_version_of_feather_is_refused(tmp_path: Path):
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(SourceError, match="Feather's old version 1"):
        open_table(tmp_path / "a.feather", SourceOptions())


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.arrow", [0, 1, 2])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match="can't be read"):
        open_table(path, SourceOptions())
