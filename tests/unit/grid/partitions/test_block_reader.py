"""Blocks that are read one by one."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_rows import columns, make_rows, write_rows

from insitu.base.errors import CorruptPartition
from insitu.base.spec import Column
from insitu.grid.partitions import DIRECT_ALIGNMENT, TEXT, BlockReader, Partition, row_bytes
from insitu.grid.partitions import block_reader as module
from tests.support.descriptors import find_new_descriptors, list_descriptors

ANY = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY
@given(columns(), st.integers(1, 60), st.integers(1, 40), st.sampled_from([0, 10**6]), st.data())
def test_chosen_columns_of_each_block_are_read(
    tmp_path: Path,
    columns: tuple[Column, ...],
    rows: int,
    block_rows: int,
    worth_skipping: int,
    data: st.DataObject,
) -> None:
    path = tmp_path / "part"
    path.unlink(missing_ok=True)
    values = make_rows(columns, rows)
    write_rows(path, columns, values, rows, block_rows)
    chosen = data.draw(st.lists(st.sampled_from(columns), unique=True, min_size=1))
    reader = BlockReader(Partition(path, columns, rows, block_rows), columns, chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH_SKIPPING", worth_skipping)
        for block in range(-(-rows // block_rows)):
            memory = np.full(reader.size(block), 255, np.uint8)
            reader.read(block, memory)
            expected = slice(block * block_rows, min(rows, (block + 1) * block_rows))
            count = expected.stop - expected.start
            for column in chosen:
                if column.dtype == TEXT:
                    found = reader.texts(block, memory, column.name).to_pylist()
                    assert found == values[column.name][expected].tolist()
                    continue
                start = reader.column_starts(block)[column.name]
                raw = memory[start : start + count * row_bytes(column)].view(column.dtype)
                np.testing.assert_array_equal(raw.reshape(-1, *column.shape), values[column.name][expected])


@ANY
@given(columns(), st.integers(1, 60), st.integers(1, 40), st.integers(0, 5000), st.data())
def test_direct_reads_give_the_same_bytes(
    tmp_path: Path,
    columns: tuple[Column, ...],
    rows: int,
    block_rows: int,
    place: int,
    data: st.DataObject,
) -> None:
    path = tmp_path / "part"
    path.unlink(missing_ok=True)
    write_rows(path, columns, make_rows(columns, rows), rows, block_rows)
    chosen = data.draw(st.lists(st.sampled_from(columns), unique=True, min_size=1))
    partition = Partition(path, columns, rows, block_rows)
    plain = BlockReader(partition, columns, chosen)
    direct = BlockReader(partition, columns, chosen, direct=True)
    pages = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    # As in the file, seen from a page, and anywhere else.
    for start in (DIRECT_ALIGNMENT + plain.offset(0) % DIRECT_ALIGNMENT, place):
        expected = np.full(plain.size(0), 7, np.uint8)
        plain.read(0, expected)
        direct.read(0, pages, start)
        for column in chosen:
            if column.dtype != TEXT:
                first = plain.column_starts(0)[column.name]
                stop = first + min(rows, block_rows) * row_bytes(column)
                np.testing.assert_array_equal(pages[start + first : start + stop], expected[first:stop])


def test_a_file_system_without_direct_reads_is_read_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reader(tmp_path / "part", "n")
    reader = BlockReader(Partition(tmp_path / "part", COLUMNS, 50, 20), COLUMNS, COLUMNS[1:2], direct=True)
    refused, preadv = [], os.preadv

    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if reader._direct is not None and descriptor == reader._direct._descriptor:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(module.os, "preadv", refuse)
    pages = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    for _ in range(2):
        reader.read(0, pages, reader.offset(0) % DIRECT_ALIGNMENT)
    assert len(refused) <= 1 and not reader.direct


COLUMNS = (Column("x", "uint8", (40,)), Column("n", "int64"), Column("t", TEXT))


def make_reader(path: Path, *names: str) -> BlockReader:
    if not path.exists():
        write_rows(path, COLUMNS, make_rows(COLUMNS, 50), 50, 20)
    chosen = [column for column in COLUMNS if column.name in names]
    return BlockReader(Partition(path, COLUMNS, 50, 20), COLUMNS, chosen)


@ANY
@given(st.integers(0, 2), st.integers(0, 10**6), st.integers(1, 255))
def test_damage_of_a_chosen_column_is_found(tmp_path: Path, block: int, where: int, change: int) -> None:
    path = tmp_path / "part"
    path.unlink(missing_ok=True)
    reader = make_reader(path, "x", "n", "t")
    place = Partition(path, COLUMNS, 50, 20).places[block]
    with path.open("r+b") as file:
        # Behind the metadata, all bytes count.
        offset = int(place["offset"] + place["metadata_bytes"]) + where % int(place["body_bytes"])
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ change]))
    for other in {0, 1, 2} - {block}:
        reader.read(other, np.empty(reader.size(other), np.uint8))
    with pytest.raises(CorruptPartition, match=f"of its block {block} is damaged"):
        reader.read(block, np.empty(reader.size(block), np.uint8))


def test_damage_of_other_columns_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "part"
    reader = make_reader(path, "n")
    start = int(Partition(path, COLUMNS, 50, 20).places[1]["offset"]) + reader.body_start(1)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"damage")
    reader.read(1, np.empty(reader.size(1), np.uint8))
    with pytest.raises(CorruptPartition, match="column 'x' of its block 1 is damaged"):
        make_reader(path, "x").read(1, np.empty(reader.size(1), np.uint8))


def test_a_file_that_was_cut_short_and_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "part"
    reader = make_reader(path, "x")
    memory = np.empty(reader.size(2), np.uint8)
    os.truncate(path, 4000)
    with pytest.raises(CorruptPartition, match="it ends within its block 2"):
        reader.read(2, memory)

    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.os, "preadv", fail)
    with pytest.raises(CorruptPartition, match=r"its block 0 can't be read \(Input/output error\)"):
        reader.read(0, memory)


def test_a_block_that_says_it_is_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part"
    reader = make_reader(path, "x")
    data = path.read_bytes()
    assert data.count(b"block 0000000001 ") == 1
    path.write_bytes(data.replace(b"block 0000000001 ", b"block 0000000000 "))
    with pytest.raises(CorruptPartition, match="the metadata of its block 1 is damaged"):
        reader.read(1, np.empty(reader.size(1), np.uint8))


def test_damaged_metadata_gives_no_other_texts(tmp_path: Path) -> None:
    """It has no checksum. Arrow's own reader ended in an error of its own, and could be led anywhere."""
    path = tmp_path / "part"
    reader = make_reader(path, "x", "t")
    expected = make_rows(COLUMNS, 50)["t"][20:40].tolist()
    place = Partition(path, COLUMNS, 50, 20).places[1]
    whole, start = path.read_bytes(), int(place["offset"])
    refused = 0
    for at in range(start, start + int(place["metadata_bytes"])):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        memory = np.zeros(reader.size(1), np.uint8)
        try:
            reader.read(1, memory)
        except CorruptPartition:
            refused += 1
            continue
        assert reader.texts(1, memory, "t").to_pylist() == expected
    assert refused >= len("block 0000000001 crc32:") + 3 * 8


def test_a_block_that_the_footer_makes_too_short_is_damaged(tmp_path: Path) -> None:
    """Its rows ended beyond its memory."""
    reader = make_reader(tmp_path / "part", "t")
    reader._places = reader._places.copy()
    reader._places["body_bytes"][1] = 16
    with pytest.raises(CorruptPartition, match="block 1"):
        reader.read(1, np.zeros(reader.size(1), np.uint8))


@pytest.mark.parametrize("direct", [False, True])
def test_thousands_of_partitions_keep_few_files_open(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    monkeypatch.setattr(module, "_MOST_OPEN", module._File._open + 2)
    make_reader(tmp_path / "part", "n")
    partition = Partition(tmp_path / "part", COLUMNS, 50, 20)
    before = list_descriptors()
    readers = [BlockReader(partition, COLUMNS, COLUMNS[:1], direct=direct) for _ in range(5)]
    assert find_new_descriptors(before, str(tmp_path)) == [str(tmp_path / "part")] * 2
    pages = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    for reader in readers:
        reader.read(1, pages, reader.offset(1) % DIRECT_ALIGNMENT)
    del readers, reader
    gc.collect()
    assert find_new_descriptors(before, str(tmp_path)) == []
