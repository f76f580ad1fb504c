"""What is particular to `.npy`; `test_sources.py` has what all formats do."""

from __future__ import annotations

import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.npy import NpySource, array_blocks, read_header

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


def test_rows_and_bytes_beyond_two_to_the_32(tmp_path: Path) -> None:
    """A file with a hole of 16 GiB, of which the end is read."""
    rows = 2**33 + 5
    with (tmp_path / "a.npy").open("wb") as file:
        header = {"descr": "<u2", "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.truncate(start + 2 * rows)
        file.seek(start + 2 * (rows - 3))
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    source = NpySource(tmp_path / "a.npy", SourceOptions())
    assert source.expected_rows == rows
    (block,) = source.blocks(1 << 20, start=rows - 4)
    assert block.columns["x"].tolist() == [0, 7, 8, 9] and block.next_start == rows
    assert block.source_bytes == (tmp_path / "a.npy").stat().st_size


def test_a_row_has_at_most_as_many_values_as_arrow_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 5, 4)))
    monkeypatch.setattr("insitu.grid.sources.base.MOST_ROW_VALUES", 20)
    NpySource(tmp_path / "a.npy", SourceOptions())
    monkeypatch.setattr("insitu.grid.sources.base.MOST_ROW_VALUES", 19)
    with pytest.raises(SourceError, match=r"at most 19 values. Received: column 'x' with rows of shape"):
        NpySource(tmp_path / "a.npy", SourceOptions())


def test_threads_read_headers_side_by_side(tmp_path: Path) -> None:
    # A collection that calls Python, as JAX has it, lets another thread run in the middle of a parse. The
    # interpreter takes that for a broken syntax tree.
    np.save(tmp_path / "a.npy", np.zeros((16, 3), np.float32))
    held = (tmp_path / "a.npy").read_bytes()
    before = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(_run_python)
    gc.set_threshold(3)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: read_header(io.BytesIO(held), "a.npy").shape, range(400)))
    finally:
        gc.callbacks.remove(_run_python)
        gc.set_threshold(*before[0])
        sys.setswitchinterval(before[1])
    assert found == [(16, 3)] * 400


def _run_python(phase: str, info: dict[str, int]) -> None:
    sum(range(20))
