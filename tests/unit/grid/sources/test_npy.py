"""What is particular to `.npy`; `test_sources.py` has what all formats do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from insitu.errors import SourceError
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.npy import NpySource, array_blocks, read_header
from insitu.spec import Column

VALUES = np.arange(60, dtype=">i2").reshape(10, 3, 2)


@pytest.mark.parametrize("fortran", [False, True])
def test_the_header_says_where_which_values_lie(tmp_path: Path, fortran: bool):
    np.save(tmp_path / "a.npy", np.asfortranarray(VALUES) if fortran else VALUES)
    with (tmp_path / "a.npy").open("rb") as file:
        header = read_header(file, "a.npy")
    assert (header.shape, header.dtype, header.fortran) == ((10, 3, 2), np.dtype(">i2"), fortran)
    assert (header.rows, header.row_bytes, header.value_bytes) == (10, 12, 120)
    assert header.start + header.value_bytes == (tmp_path / "a.npy").stat().st_size


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 10, 100])
def test_blocks_have_so_many_rows_and_the_last_one_the_rest(tmp_path: Path, rows: int, fortran: bool):
    np.save(tmp_path / "a.npy", np.asfortranarray(VALUES) if fortran else VALUES)
    with (tmp_path / "a.npy").open("rb", buffering=0) as file:
        header = read_header(file, "a.npy")
        blocks = [block.copy() for block in array_blocks(file, header, rows, "a.npy")]
    assert [len(block) for block in blocks[:-1]] == [rows] * (len(blocks) - 1)
    np.testing.assert_array_equal(np.concatenate(blocks), VALUES)


def test_the_column_has_the_name_that_the_user_gives(tmp_path: Path):
    np.save(tmp_path / "a.npy", VALUES)
    source = NpySource(tmp_path / "a.npy", SourceOptions(column="image"))
    assert source.columns == (Column("image", "int16", (3, 2)),)
    (block,) = source.blocks(1 << 20)
    assert (block.rows, block.source_bytes) == (10, source.path.stat().st_size)
    np.testing.assert_array_equal(block.columns["image"], VALUES)


def test_a_file_that_is_cut_off_after_it_was_opened_is_noticed(tmp_path: Path):
    np.save(tmp_path / "a.npy", VALUES)
    source = NpySource(tmp_path / "a.npy", SourceOptions())
    with source.path.open("r+b") as file:
        file.truncate(source.path.stat().st_size - 1)
    with pytest.raises(SourceError, match="is truncated: row 9"):
        list(source.blocks(12))
    with pytest.raises(SourceError, match="is truncated: its header promises 120 bytes"):
        NpySource(source.path, SourceOptions())
