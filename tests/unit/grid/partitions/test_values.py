"""Rows that are in several blocks of memory."""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import Column
from insitu.grid.partitions.address_space import AddressSpace
from insitu.grid.partitions.values import BlockedValues, TextValues, count_shared, split_range

COLUMN = Column("x", "int16", (3,))
SIZE = 6


@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_blocks_may_lie_anywhere(block_rows: int, extra: int, gaps: list[int], data: st.DataObject) -> None:
    """Those that are no multiple of a row's size apart too, and those that are moved."""
    starts, position = [], 0
    for gap in gaps:
        starts.append(position + 2 * gap)
        position = starts[-1] + block_rows * SIZE
    memory = np.random.default_rng(0).integers(0, 255, position + extra, dtype=np.uint8)
    values = BlockedValues(memory, COLUMN, block_rows, np.array(starts))
    if data.draw(st.booleans()):
        block, to = data.draw(st.integers(0, len(gaps) - 1)), data.draw(st.integers(0, len(gaps) - 1))
        values.move(block, starts[to])
        starts[block] = starts[to]
    rows = np.array(data.draw(st.lists(st.integers(0, len(gaps) * block_rows - 1), max_size=20)), int)
    out = np.empty((len(rows), 3), np.int16)
    values.take(rows, out)
    where = [starts[row // block_rows] + row % block_rows * SIZE for row in rows]
    expected = [np.frombuffer(memory[w : w + SIZE].tobytes(), np.int16) for w in where]
    np.testing.assert_array_equal(out, np.array(expected, np.int16).reshape(-1, 3))
    out[:] = 0
    values.take_located(values.locate(rows), out)
    np.testing.assert_array_equal(out, np.array(expected, np.int16).reshape(-1, 3))


@pytest.mark.parametrize("odd", [0, 4])
def test_memory_may_be_larger_than_two_to_the_31(odd: int, tmp_path: Path) -> None:
    """The file is sparse: a hole but for the last row."""
    start = 5 * 2**30 // SIZE * SIZE + odd
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(start + 2 * SIZE)
        file.seek(start + SIZE)
        file.write(np.array([1, 2, 3], np.int16).tobytes())
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    values = BlockedValues(np.frombuffer(mapping, np.uint8), COLUMN, 2, np.array([0, start]))
    out = np.empty((2, 3), np.int16)
    values.take(np.array([3, 0]), out)
    assert out.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert values.slice(3, 4).tolist() == [[1, 2, 3]]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_a_range_is_split_where_blocks_end(start: int, length: int, block_rows: int) -> None:
    found = [
        block * block_rows + row
        for block, first, end in split_range(start, start + length, block_rows)
        for row in range(first, end)
    ]
    assert found == list(range(start, start + length))


def test_rows_beyond_2_to_the_32_bytes_are_found(tmp_path: Path) -> None:
    size, block_rows = 6 << 30, 1 << 20
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(size)
        for row in (5, 600_000_000, size // 8 - 1):
            file.seek(8 * row)
            file.write(row.to_bytes(8, "little"))
    space = AddressSpace([path], [size], 8)
    starts = np.arange(size // 8 // block_rows) * block_rows * 8
    values = BlockedValues(space.memory, Column("x", "int64"), block_rows, starts)
    rows = np.array([size // 8 - 1, 5, 600_000_000, 600_000_001])
    assert values.pick(rows).tolist() == [size // 8 - 1, 5, 600_000_000, 0]
    assert values.slice(600_000_000, 600_000_002).tolist() == [600_000_000, 0]


@given(st.lists(st.text("ab", max_size=2), min_size=1, max_size=40), st.integers(1, 7), st.data())
def test_shared_texts_are_those_of_the_rows_and_counted(
    texts: list[str], block_rows: int, data: st.DataObject
) -> None:
    blocks = [
        pa.array(texts[i : i + block_rows], pa.large_string()) for i in range(0, len(texts), block_rows)
    ]
    values = TextValues(blocks, block_rows)
    start = data.draw(st.integers(0, len(texts)))
    stop = data.draw(st.integers(start, len(texts)))
    found = values.slice_shared(start, stop)
    assert type(found) is np.ndarray and found.tolist() == values.slice(start, stop).tolist()
    counted = count_shared(found.reshape(-1))
    if counted is not None:
        keys, counts = counted
        assert {k: n for k, n in zip(keys.to_pylist(), counts, strict=True) if n} == Counter(
            texts[start:stop]
        )


def test_texts_that_a_function_has_changed_are_not_counted_as_they_were() -> None:
    values = TextValues([pa.array(["a", "b"] * 8, pa.large_string())] * 2, 16)
    found = values.slice_shared(1, 27)
    assert count_shared(found) is not None and len({id(text) for text in found}) == 2
    assert count_shared(found[1:]) is None and count_shared(found[::-1]) is None
    assert count_shared(found.copy()) is None
    found[2] = "c"
    assert count_shared(found) is None
    missing = TextValues([pa.array(["a", None, "a", "a", None], pa.large_string())], 5)
    assert missing.slice_shared(0, 5).tolist() == ["a", None, "a", "a", None]
