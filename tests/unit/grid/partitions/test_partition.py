"""Partitions as they are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_rows import columns, make_rows, write_rows

from insitu.base.errors import CorruptPartition
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT, Partition

ANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY
@given(columns(), st.integers(0, 90), st.integers(1, 40), st.data())
def test_rows_of_any_block_are_read(
    tmp_path: Path, columns: tuple[Column, ...], rows: int, block_rows: int, data: st.DataObject
) -> None:
    path = tmp_path / "part.arrow"
    path.unlink(missing_ok=True)
    values = make_rows(columns, rows)
    write_rows(path, columns, values, rows, block_rows)
    partition = Partition(path, columns, rows, block_rows)
    wanted = np.array(data.draw(st.lists(st.integers(0, max(0, rows - 1)), max_size=30 if rows else 0)), int)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    for column in columns:
        expected = values[column.name]
        out = np.empty((len(wanted), *column.shape), object if column.dtype == TEXT else column.dtype)
        partition.values[column.name].take(wanted, out)
        np.testing.assert_array_equal(out, expected[wanted])
        found = partition.values[column.name].slice(start, stop)
        np.testing.assert_array_equal(found, expected[start:stop])
        if column.dtype != TEXT:
            assert partition.bytes_per_row(column.name) == expected.nbytes / max(1, rows) or not rows


def test_a_file_of_one_block_as_it_was_made_before(tmp_path: Path) -> None:
    columns = (Column("x", "uint8", (3,)), Column("n", "int64"))
    values = make_rows(columns, 10)
    write_rows(tmp_path / "a", columns, values, 10, 10)
    partition = Partition(tmp_path / "a", columns, 10)
    np.testing.assert_array_equal(partition.values["x"].slice(0, 10), values["x"])


COLUMNS = (Column("x", "int64"), Column("t", TEXT))


@pytest.mark.parametrize(
    ("columns", "rows", "block_rows", "message"),
    [
        (COLUMNS, 20, 4, "5 blocks, expected 3|3 blocks, expected 5"),
        (COLUMNS, 17, 8, "its block 2 has 4 rows, expected 1"),
        (COLUMNS, 20, 0, "3 blocks, expected 1"),
        ((Column("x", "int32"), Column("t", TEXT)), 20, 8, "unlike those expected"),
    ],
)
def test_another_shape_than_expected(
    tmp_path: Path, columns: tuple[Column, ...], rows: int, block_rows: int, message: str
) -> None:
    write_rows(tmp_path / "a", COLUMNS, make_rows(COLUMNS, 20), 20, 8)
    with pytest.raises(CorruptPartition, match=message):
        Partition(tmp_path / "a", columns, rows, block_rows)


@ANY
@given(st.integers(0, 5000), st.integers(1, 255), st.integers(0, 5000))
def test_a_damaged_file_is_refused_or_read_without_a_crash(
    tmp_path: Path, where: int, change: int, cut: int
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "damaged"
    if not whole.exists():
        write_rows(whole, COLUMNS, make_rows(COLUMNS, 20), 20, 8)
    shutil.copyfile(whole, path)
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= change
    path.write_bytes(data[: len(data) - cut % 3 * (cut % len(data))])
    try:
        partition = Partition(path, COLUMNS, 20, 8)
        partition.values["x"].slice(0, 20)
        partition.values["t"].slice(0, 20)
    except (CorruptPartition, UnicodeDecodeError):
        pass
