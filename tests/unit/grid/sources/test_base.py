"""What all formats share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources.base import (
    DTYPES,
    check_column,
    describe_columns,
    native,
    raw_bytes,
    rows_per_block,
)

PATH = Path("a.npy")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_has_the_dtype_by_its_name_in_any_byte_order(dtype: str):
    found = check_column(PATH, "x", np.dtype(dtype).newbyteorder(">"), (2, 3))
    assert found == Column("x", dtype, (2, 3))


def test_text_is_a_column_of_its_own_kind():
    assert check_column(PATH, "x", np.dtype("<U7"), ()) == Column("x", "str")


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("", "f4", (), "a column without a name"),
        ("x", object, (), "Python objects"),
        ("x", "<U7", (2,), "Text must be one per row"),
        ("x", "c8", (), "dtype complex64, which a cache can't hold"),
        ("x", "M8[s]", (), "which a cache can't hold"),
        ("x", "f4", (3, 0), "hold no values"),
    ],
)
def test_what_can_be_no_column_is_refused(name: str, dtype: Any, shape: tuple[int, ...], message: str):
    with pytest.raises(SourceError, match=message):
        check_column(PATH, name, np.dtype(dtype), shape)


def test_a_block_has_a_row_at_least():
    assert rows_per_block(10, 105) == 10
    assert rows_per_block(1000, 10) == 1
    assert rows_per_block(0, 10) == 10


def test_native_values_are_contiguous_and_equal():
    values = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    found = native(values)
    assert found.dtype.isnative and found.flags.c_contiguous
    np.testing.assert_array_equal(found, values)


def test_raw_bytes_are_those_of_the_array_in_place():
    values = np.zeros((2, 3), "f4")
    raw = raw_bytes(values)
    assert raw.nbytes == values.nbytes
    raw[:4] = np.float32(5).tobytes()
    assert values[0, 0] == 5


def test_columns_are_described_by_name_dtype_and_shape():
    columns = (Column("x", "uint8", (28, 28)), Column("label", "int64"), Column("name", "str"))
    assert describe_columns(columns) == "x uint8[28, 28], label int64, name text"
