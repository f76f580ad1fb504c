"""Blocks of compressed partitions that are read one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_rows import CODECS, columns, make_rows, write_blocks, write_rows

from insitu.base.errors import CorruptPartition
from insitu.base.spec import Column
from insitu.grid.partitions import (
    TEXT,
    BlockReader,
    Partition,
    PartitionWriter,
    open_block_reader,
    row_bytes,
)
from insitu.grid.partitions import compressed_reader as module

ANY = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, columns: tuple[Column, ...], rows: int, block_rows: int, codec: str) -> Partition:
    path.unlink(missing_ok=True)
    writer = PartitionWriter(path, columns, codec=codec)
    write_blocks(writer, columns, make_rows(columns, rows), rows, block_rows)
    writer.close()
    return Partition(path, columns, rows, block_rows, codec, writer.raw_bytes)


@ANY
@given(
    columns(),
    st.integers(1, 60),
    st.integers(1, 40),
    CODECS,
    st.sampled_from([0, 10**6]),
    st.booleans(),
    st.data(),
)
def test_chosen_columns_of_each_block_are_read(
    tmp_path: Path,
    columns: tuple[Column, ...],
    rows: int,
    block_rows: int,
    codec: str,
    worth_skipping: int,
    direct: bool,
    data: st.DataObject,
) -> None:
    values = make_rows(columns, rows)
    partition = write(tmp_path / "part", columns, rows, block_rows, codec)
    chosen = data.draw(st.lists(st.sampled_from(columns), unique=True, min_size=1))
    reader = open_block_reader(partition, columns, chosen, direct=direct)
    assert not reader.direct
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH_SKIPPING", worth_skipping)
        for block in range(-(-rows // block_rows)):
            whole = np.full(reader.size(block) + 48, 255, np.uint8)
            reader.read(block, whole, 24)
            assert (whole[:24] == 255).all() and (whole[24 + reader.size(block) :] == 255).all()
            memory = whole[24 : 24 + reader.size(block)]
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


COLUMNS = (Column("x", "uint8", (40,)), Column("n", "int64"), Column("t", TEXT))


@ANY
@given(st.integers(0, 2), st.integers(0, 10**6), st.integers(1, 255), CODECS)
def test_damage_of_a_block_is_found(tmp_path: Path, block: int, where: int, change: int, codec: str) -> None:
    partition = write(tmp_path / "part", COLUMNS, 50, 20, codec)
    reader = open_block_reader(partition, COLUMNS, COLUMNS)
    place = partition.places[block]
    with partition.path.open("r+b") as file:
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


def test_damage_of_other_columns_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = write(tmp_path / "part", COLUMNS, 50, 20, "lz4")
    place = partition.places[1]
    with partition.path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]))
        file.write(b"damage")
    for worth_skipping in (0, 10**6):
        monkeypatch.setattr(module, "WORTH_SKIPPING", worth_skipping)
        reader = open_block_reader(partition, COLUMNS, COLUMNS[1:2])
        reader.read(1, np.empty(reader.size(1), np.uint8))
    reader = open_block_reader(partition, COLUMNS, COLUMNS[:1])
    with pytest.raises(CorruptPartition, match="column 'x' of its block 1 is damaged"):
        reader.read(1, np.empty(reader.size(1), np.uint8))


def test_a_file_that_was_cut_short_names_the_block(tmp_path: Path) -> None:
    partition = write(tmp_path / "part", COLUMNS, 50, 20, "zstd")
    reader = open_block_reader(partition, COLUMNS, COLUMNS, direct=True)
    with partition.path.open("r+b") as file:
        file.truncate(int(partition.places[1]["offset"]) + 30)
    reader.read(0, np.empty(reader.size(0), np.uint8))
    with pytest.raises(CorruptPartition, match="it ends within its block 1"):
        reader.read(1, np.empty(reader.size(1), np.uint8))


def test_other_partitions_are_read_as_they_are(tmp_path: Path) -> None:
    write_rows(tmp_path / "p", COLUMNS, make_rows(COLUMNS, 50), 50, 20)
    plain = Partition(tmp_path / "p", COLUMNS, 50, 20)
    assert type(open_block_reader(plain, COLUMNS, COLUMNS)) is BlockReader
    with pytest.raises(ValueError, match="isn't compressed"):
        module.CompressedBlockReader(plain, COLUMNS, COLUMNS)
