"""Blocks that are read from the first copy that has them whole."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from partition_rows import make_rows, write_rows

from insitu.errors import CorruptPartition
from insitu.grid.block_copies import BlockCopies
from insitu.grid.partitions import BlockReader, Partition
from insitu.spec import Column

COLUMNS = (Column("x", "int64"),)


def open_copy(path: Path) -> BlockReader:
    return BlockReader(Partition(path, COLUMNS, 20, 8), COLUMNS, COLUMNS)


def damage(path: Path, block: int) -> None:
    place = Partition(path, COLUMNS, 20, 8).places[block]
    with path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]))
        file.write(b"damage")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two equal copies."""
    found = [tmp_path / "first", tmp_path / "second"]
    for path in found:
        write_rows(path, COLUMNS, make_rows(COLUMNS, 20), 20, 8)
    return found


def test_a_bad_block_comes_from_the_next_copy_and_others_from_the_first(
    paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    damage(paths[0], 1)
    opened: list[Path] = []

    def open_and_note(path: Path) -> BlockReader:
        opened.append(path)
        return open_copy(path)

    copies = BlockCopies("it", [lambda path=path: open_and_note(path) for path in paths])
    memory = np.empty(copies.size(0), np.uint8)
    copies.read(0, memory)
    assert opened == paths[:1]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            copies.read(1, memory[: copies.size(1)])
    assert opened == paths and caplog.text.count("Trying the copy on another node") == 1
    start = copies.column_starts(1)["x"]
    expected = make_rows(COLUMNS, 20)["x"][8:16]
    np.testing.assert_array_equal(memory[start : start + 64].view(np.int64), expected)


def test_a_copy_that_cannot_be_opened_is_passed_over(paths: list[Path]) -> None:
    paths[0].write_bytes(b"not a partition")
    copies = BlockCopies("it", [lambda path=path: open_copy(path) for path in paths])
    memory = np.empty(copies.size(2), np.uint8)
    copies.read(2, memory)
    start = copies.column_starts(2)["x"]
    expected = make_rows(COLUMNS, 20)["x"][16:]
    np.testing.assert_array_equal(memory[start : start + expected.nbytes].view(np.int64), expected)


def test_all_failures_are_named_where_no_copy_is_whole(paths: list[Path]) -> None:
    for path in paths:
        damage(path, 1)
    copies = BlockCopies("it", [lambda path=path: open_copy(path) for path in paths])
    with pytest.raises(CorruptPartition, match=r"None of the 2 copies of it can be read.*first.*second"):
        copies.read(1, np.empty(copies.size(1), np.uint8))
    for path in paths:
        path.write_bytes(b"not a partition")
    with pytest.raises(CorruptPartition, match="None of the 2 copies"):
        BlockCopies("it", [lambda path=path: open_copy(path) for path in paths])
