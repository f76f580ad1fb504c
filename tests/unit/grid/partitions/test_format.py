"""Sizes of blocks, and what their metadata says."""

from __future__ import annotations

import pytest

from insitu.base.spec import Column
from insitu.grid.partitions import rows_per_block
from insitu.grid.partitions.format import BlockMark, body_alignment, find_mark, make_mark


@pytest.mark.parametrize(
    ("columns", "text_bytes", "rows"),
    [
        ((Column("x", "uint8", (784,)), Column("label", "int64")), 0, 1323),
        ((Column("x", "uint8", (10 << 20,)),), 0, 1),
        ((Column("x", "uint8"),), 0, 1 << 20),
        ((Column("t", "str"),), 1000.0, 1040),
        (tuple(Column(f"c{i}", "float64") for i in range(2000)), 0, 800),
    ],
)
def test_a_block_is_about_a_mebibyte(columns: tuple[Column, ...], text_bytes: float, rows: int) -> None:
    assert rows_per_block(columns, text_bytes) == rows


def test_many_partitions_have_smaller_blocks() -> None:
    columns = (Column("x", "uint8", (64,)),)
    assert rows_per_block(columns, limit=1 << 16) == 1024
    assert rows_per_block(columns, limit=1) == 64


def test_bodies_are_aligned_for_the_rows_of_as_many_columns_as_can_be() -> None:
    assert body_alignment((Column("x", "uint8", (784,)), Column("label", "int64"))) == 784
    assert body_alignment((Column("x", "float32", (3,)), Column("n", "int64"))) == 24
    assert body_alignment((Column("x", "uint8", (10 << 20 | 1,)), Column("n", "int16", (5,)))) == 40
    assert body_alignment((Column("t", "str"),)) == 8


def test_a_mark_is_found_again() -> None:
    (text,) = make_mark(BlockMark(12, (0xABCDEF, 7)), 24).values()
    assert find_mark(b"..." + text.encode() + b"...") == BlockMark(12, (0xABCDEF, 7))
    assert find_mark(b"no mark") is None
