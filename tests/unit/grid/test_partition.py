"""Partition files: what may be in one."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from insitu.grid.partition import Buffers, Partition, body_layout, row_bytes, take, write_partition
from insitu.spec import Column


@pytest.mark.parametrize("column", [Column("x", "uint8", (1 << 20,)), Column("x", "uint8")])
def test_a_column_may_hold_more_than_two_to_the_31_values(column: Column, tmp_path: Path) -> None:
    """The file is sparse: its values are a hole but for the last byte, and nobody reads it whole."""
    path, columns = tmp_path / "part.arrow", (column, Column("n", "int64", (2,)))
    rows = (1 << 31) // row_bytes(column) + 10
    columns = columns if column.shape else columns[:1]
    start, size = body_layout(columns)[1], rows * row_bytes(column)
    with path.open("w+b") as file:
        file.truncate(start + size + -size % 64)
        file.seek(start + size - 1)
        file.write(b"\7")
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    buffers = {
        "x": Buffers(pa.py_buffer(mapping).slice(start)),
        "n": Buffers(pa.py_buffer(np.arange(2 * rows + 64))) if column.shape else Buffers(None),
    }
    written, _ = write_partition(path, columns, rows, buffers, in_place=0)
    assert written == path.stat().st_size > 1 << 31
    partition = Partition(path, columns, rows)
    assert partition.values["x"].shape == (rows, *column.shape)
    out = np.empty((2, *column.shape), np.uint8)
    take(partition.values["x"], np.array([rows - 1, 0]), out)
    assert out.reshape(2, -1)[:, -1].tolist() == [7, 0]
    if column.shape:
        assert partition.values["n"][-1].tolist() == [2 * rows - 2, 2 * rows - 1]
