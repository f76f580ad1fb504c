"""Blocks that are read from a copy that has them whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partition_rows import make_rows, write_rows

from insitu.base.errors import CorruptPartition
from insitu.base.spec import Column, NodeId
from insitu.grid.partitions import BlockReader, Partition
from insitu.grid.reading.store import BlockCopies

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


def make_copies(paths: list[Path]) -> tuple[BlockCopies, list[str]]:
    """Return copies that are tried in order, and a list of what was said about those that were given up."""
    left, said = paths[1:], list[str]()

    def reopen(node: NodeId, error: CorruptPartition) -> tuple[NodeId, BlockReader]:
        said.append(f"{node}: {error.why}")
        if not left:
            raise error
        path = left.pop(0)
        return NodeId(path.name), open_copy(path)

    return BlockCopies(NodeId(paths[0].name), open_copy(paths[0]), reopen), said


def test_a_bad_block_comes_from_the_next_copy_and_so_do_others_from_then_on(paths: list[Path]) -> None:
    damage(paths[0], 1)
    copies, said = make_copies(paths)
    memory = np.empty(copies.size(0), np.uint8)
    copies.read(0, memory)
    assert said == []
    for _ in range(2):
        copies.read(1, memory[: copies.size(1)])
    assert said == ["first: column 'x' of its block 1 is damaged"]
    start = copies.column_starts(1)["x"]
    expected = make_rows(COLUMNS, 20)["x"][8:16]
    np.testing.assert_array_equal(memory[start : start + 64].view(np.int64), expected)


def test_the_error_is_raised_when_no_copy_is_left(paths: list[Path]) -> None:
    for path in paths:
        damage(path, 1)
    copies, said = make_copies(paths)
    with pytest.raises(CorruptPartition, match=r"second.*block 1 is damaged"):
        copies.read(1, np.empty(copies.size(1), np.uint8))
    assert [each.split(":")[0] for each in said] == ["first", "second"]


def test_a_copy_whose_blocks_lie_elsewhere_takes_no_memory_of_another(paths: list[Path]) -> None:
    damage(paths[0], 1)
    columns = (Column("x", "int32"),)
    paths[1].unlink()
    write_rows(paths[1], columns, make_rows(columns, 20), 20, 8)
    other = BlockReader(Partition(paths[1], columns, 20, 8), columns, columns)
    copies = BlockCopies(NodeId("a"), open_copy(paths[0]), lambda node, error: (NodeId("b"), other))
    with pytest.raises(CorruptPartition, match=r"first.*block 1 is damaged"):
        copies.read(1, np.empty(copies.size(1), np.uint8))
