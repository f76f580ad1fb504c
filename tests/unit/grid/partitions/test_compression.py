"""Partitions whose columns are compressed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_rows import CODECS, columns, make_rows, write_blocks, write_rows

from insitu.base.errors import CorruptPartition, GridError
from insitu.base.spec import Column
from insitu.grid.partitions import RAGGED, TEXT, Partition, PartitionWriter, file_checksum
from insitu.grid.partitions import compression as module
from insitu.grid.partitions.compression import decompress
from insitu.grid.partitions.format import file_order

ANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(
    path: Path, columns: tuple[Column, ...], values: Any, rows: int, block_rows: int, codec: str = "lz4"
) -> PartitionWriter:
    path.unlink(missing_ok=True)
    writer = PartitionWriter(path, columns, codec=codec)
    write_blocks(writer, columns, values, rows, block_rows)
    writer.size, writer.checksum = writer.close()  # type: ignore[attr-defined]
    return writer


@ANY
@given(columns(), st.integers(0, 90), st.integers(1, 40), CODECS)
def test_arrow_reads_what_is_written(
    tmp_path: Path, columns: tuple[Column, ...], rows: int, block_rows: int, codec: str
) -> None:
    values = make_rows(columns, rows)
    path, plain = tmp_path / "part", tmp_path / "plain"
    writer = write(path, columns, values, rows, block_rows, codec)
    plain.unlink(missing_ok=True)
    size, _ = write_rows(plain, columns, values, rows, block_rows)
    found, expected = pa.ipc.open_file(path), pa.ipc.open_file(plain)
    assert found.num_record_batches == expected.num_record_batches
    for number in range(found.num_record_batches):
        found.get_batch(number).validate(full=True)
    assert found.read_all().equals(expected.read_all())
    data: Any = writer
    assert data.size == path.stat().st_size and data.checksum == file_checksum(path)
    # By it the order of rows is chosen, which must not depend on compression.
    assert writer.raw_bytes == size
    assert Partition(path, columns, rows, block_rows, codec, size).rows == rows


def test_only_columns_that_shrink_are_compressed(tmp_path: Path) -> None:
    columns = (Column("noise", "uint8", (512,)), Column("zeros", "float32", (128,)), Column("t", TEXT))
    rng = np.random.default_rng(0)
    values = {
        "noise": rng.integers(0, 256, (400, 512), dtype=np.uint8),
        "zeros": np.zeros((400, 128), np.float32),
        "t": np.array(["the same"] * 400, object),
    }
    writer = write(tmp_path / "p", columns, values, 400, 100)
    (noise, stored), (zeros, of_zeros), (text, of_text) = writer.column_bytes
    assert (noise, zeros, text) == (400 * 512, 400 * 512, 400 * 8 + 8 * 404)
    assert stored == noise + 4 * 8 and of_zeros < zeros // 50 and of_text < text // 2


def test_a_column_that_shrinks_later_is_compressed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRIED_AGAIN", 4)
    columns = (Column("x", "int64"),)
    noise = np.random.default_rng(0).integers(0, 2**62, 200)
    values = {"x": np.concatenate([noise, np.zeros(400, np.int64), noise])}
    write(tmp_path / "p", columns, values, 800, 100)
    size = 800 * 8 + 10_000
    sizes = Partition(tmp_path / "p", columns, 800, 100, "lz4", size).sizes
    assert sizes is not None
    # Blocks 0 and 4 are tried: blocks 2 and 3 stay as they are, and what is no smaller does, too.
    assert [stored < 200 for stored in sizes[:, 0, 0].tolist()] == [False] * 4 + [True] * 2 + [False] * 2


@ANY
@given(
    columns(),
    st.integers(1, 60),
    st.integers(1, 12),
    CODECS,
    st.integers(0, 20_000),
    st.booleans(),
    st.data(),
)
def test_a_file_that_was_cut_or_damaged_anywhere_is_completed_to_the_same(
    tmp_path: Path,
    columns: tuple[Column, ...],
    rows: int,
    block_rows: int,
    codec: str,
    where: int,
    cut: bool,
    data: st.DataObject,
) -> None:
    values, whole, path = make_rows(columns, rows), tmp_path / "whole", tmp_path / "torn"
    expected = write(whole, columns, values, rows, block_rows, codec)
    torn = bytearray(whole.read_bytes())
    if cut:
        torn = torn[: where % (len(torn) + 1)]
    else:
        torn[where % len(torn)] ^= data.draw(st.integers(1, 255))
    path.write_bytes(torn)
    writer = PartitionWriter(path, columns, codec=codec)
    try:
        adopted = writer.adopt(block_rows)
    except GridError as error:
        # Metadata that Arrow can read, and that isn't what is written.
        assert not cut and "without --resume" in str(error)
        return
    assert adopted <= rows // block_rows
    write_blocks(writer, columns, values, rows, block_rows, adopted * block_rows)
    size, checksum = writer.close()
    assert path.read_bytes() == whole.read_bytes()
    assert size == path.stat().st_size and checksum == file_checksum(path)
    assert writer.raw_bytes == expected.raw_bytes and writer.column_bytes == expected.column_bytes


def test_a_whole_file_is_adopted(tmp_path: Path) -> None:
    columns = (Column("x", "int64"), Column("t", TEXT))
    write(tmp_path / "a", columns, make_rows(columns, 20), 20, 8)
    assert PartitionWriter(tmp_path / "a", columns, codec="lz4").adopt(8) == 2
    write(tmp_path / "a", columns, make_rows(columns, 20), 20, 8)
    assert PartitionWriter(tmp_path / "a", columns, codec="lz4").adopt(7) == 0


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("column", [0, 1])
def test_blocks_before_a_damaged_one_are_adopted(tmp_path: Path, codec: str, column: int) -> None:
    columns, path = (Column("x", "int64"), Column("t", TEXT)), tmp_path / "p"
    writer = write(path, columns, make_rows(columns, 40), 40, 8, codec)
    partition = Partition(path, columns, 40, 8, codec, writer.raw_bytes)
    assert partition.sizes is not None
    data = bytearray(path.read_bytes())
    # In a buffer that is stored as it is, no decompression notices.
    start = int(partition.places[3]["offset"] + partition.places[3]["metadata_bytes"])
    data[start + (9 if column == 0 else int(partition.sizes[3, 0, 0]) + 16)] ^= 1
    path.write_bytes(data)
    assert PartitionWriter(path, columns, codec=codec).adopt(8) == 3


COLUMNS = (Column("x", "uint8", (40,)), Column("n", "int64"), Column("t", TEXT))


@ANY
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_damage_of_the_sizes_or_places_is_found_when_the_file_is_opened(
    tmp_path: Path, where: int, change: int
) -> None:
    path = tmp_path / "p"
    writer = write(path, COLUMNS, make_rows(COLUMNS, 50), 50, 20)
    partition = Partition(path, COLUMNS, 50, 20, "lz4", writer.raw_bytes)
    last = partition.places[-1]
    start = int(last["offset"] + last["metadata_bytes"] + last["body_bytes"]) + 8  # behind Arrow's mark
    data = bytearray(path.read_bytes())
    at = start + where % (module.table_bytes(3, COLUMNS) - 4)
    data[at] ^= change
    path.write_bytes(data)
    with pytest.raises(CorruptPartition, match="the sizes of its columns are damaged"):
        Partition(path, COLUMNS, 50, 20, "lz4", writer.raw_bytes)


def test_sizes_are_those_of_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "p"
    writer = write(path, COLUMNS, make_rows(COLUMNS, 50), 50, 20)
    with pytest.raises(CorruptPartition, match="sizes of its columns can't be right"):
        Partition(path, COLUMNS, 50, 20, "lz4", 100)
    with pytest.raises(CorruptPartition, match="it has 3 blocks, expected 4"):
        Partition(path, COLUMNS, 70, 20, "lz4", writer.raw_bytes)
    with pytest.raises(CorruptPartition, match="aren't those of its rows"):
        Partition(path, COLUMNS, 51, 20, "lz4", writer.raw_bytes)


def test_a_file_that_is_not_compressed_is_not_taken_for_one(tmp_path: Path) -> None:
    write_rows(tmp_path / "p", COLUMNS, make_rows(COLUMNS, 50), 50, 20)
    with pytest.raises(CorruptPartition, match="sizes of its columns are damaged"):
        Partition(tmp_path / "p", COLUMNS, 50, 20, "lz4", 10**6)


def test_a_lying_length_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    codec = pa.Codec("zstd")

    class Watched:
        def decompress(self, data: Any, size: int) -> Any:
            asked.append(size)
            return codec.decompress(data, size)

    packed = codec.compress(bytes(1000), asbytes=True)
    out = np.ones(1000, np.uint8)
    decompress(Watched(), memoryview((1000).to_bytes(8, "little") + packed), 1000, out)
    assert not out.any() and asked == [1000]
    for length, body in [(2**62, packed), (-2, packed), (1000, b"no frame"), (-1, b"short"), (999, packed)]:
        stored = memoryview(length.to_bytes(8, "little", signed=True) + body)
        with pytest.raises(ValueError, match=r"decompressed|was expected to have 1000"):
            decompress(Watched(), stored, 1000, out)
    with pytest.raises(ValueError, match="decompressed"):
        decompress(Watched(), memoryview(b"abc"), 1000, out)
    # What is larger than it says isn't given more room.
    with pytest.raises(ValueError, match="decompressed"):
        decompress(Watched(), memoryview((10).to_bytes(8, "little") + packed), 10, np.ones(10, np.uint8))
    assert set(asked) == {1000, 10}


def test_buffers_are_where_arrow_names_them(tmp_path: Path) -> None:
    columns = (
        Column("a", "uint8", (3, 2)),
        Column("b", "bool"),
        Column("t", TEXT),
        Column("r", f"int16{RAGGED}"),
    )
    values = {
        "a": np.zeros((5, 3, 2), np.uint8),
        "b": np.zeros(5, bool),
        "t": pa.array(["x"] * 5, pa.large_utf8()),
        "r": pa.array([b"ab" * n for n in range(5)], pa.large_binary()),
    }
    writer = PartitionWriter(tmp_path / "p", columns, codec="zstd")
    writer.write(5, values)
    writer.close()
    partition = Partition(tmp_path / "p", columns, 5, 5, "zstd", writer.raw_bytes)
    assert partition.sizes is not None
    numbers = list(itertools.chain(*module.buffers_by_column(columns)))
    assert numbers == [0, 1, 2, 3, 4, 5] and [c.name for c in file_order(columns)] == ["a", "b", "t", "r"]
    assert partition.sizes[0, :, 1].tolist() == [30, 5, 48, 5, 48, 20]
    assert module.buffer_slots(columns) == ([[2], [4], [6, 7], [9, 10]], 11)
    table = pa.ipc.open_file(tmp_path / "p").read_all()
    assert table["r"].to_pylist() == [b"ab" * n for n in range(5)] and table["t"].to_pylist() == ["x"] * 5
