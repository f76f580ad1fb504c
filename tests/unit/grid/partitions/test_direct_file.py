"""Files that are written past the system's cache."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.disk import durable
from insitu.base.errors import GridError
from insitu.base.spec import Column
from insitu.grid.partitions import PartitionWriter, direct_file, make_room
from insitu.grid.partitions.direct_file import ROOM_BYTES, DirectFile

COLUMNS = (Column("x", "uint8", (1000,)), Column("y", "int64"))
ROWS = 300
"""Of a block: more than 256 KiB, and no whole number of pages."""


def make_block(number: int) -> dict[str, Any]:
    draw = np.random.default_rng(number)
    return {"x": draw.integers(0, 255, (ROWS, 1000), dtype=np.uint8), "y": draw.integers(0, 9, ROWS)}


def write(path: Path, blocks: int, room: memoryview | None) -> tuple[PartitionWriter, tuple[int, str]]:
    writer = PartitionWriter(path, COLUMNS, room=room)
    for number in range(blocks):
        writer.write(ROWS, make_block(number))
    return writer, writer.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_direct", [True, False])
def test_pieces_of_any_size_become_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, is_direct: bool
) -> None:
    """Also where the file system can't go past its cache."""
    monkeypatch.setattr(direct_file, "_READ_BACK_BYTES", 1 << 20)
    if not is_direct:
        monkeypatch.setattr(durable, "_DIRECT", 0)
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 4095, 4096, 5000, 100_000, ROOM_BYTES, ROOM_BYTES + 4097]) for _ in range(12)]
    path, room, whole = tmp_path / "file", make_room(), b""
    path.write_bytes(b"what was there before" * 1000)
    file = DirectFile(path, room)
    for size in sizes:
        data = draw.randbytes(size)
        half = size // 2
        file.append([memoryview(data)[:half], memoryview(data)[half:]])
        room[:] = bytes(ROOM_BYTES)  # another file of the thread uses it
        whole += data
    assert file.finish() == zlib.crc32(whole)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("size", [0, 4096, 10_000])
def test_a_file_goes_on_behind_what_is_there(tmp_path: Path, size: int) -> None:
    path, data = tmp_path / "file", random.Random(0).randbytes(30_000)
    path.write_bytes(data[:size])
    file = DirectFile(path, make_room(), size)
    file.append([memoryview(data)[size:]])
    assert file.finish() == zlib.crc32(data) and path.read_bytes() == data


def test_a_partition_has_the_same_bytes_on_either_way(tmp_path: Path) -> None:
    plain, found = write(tmp_path / "a", 9, None)
    direct, same = write(tmp_path / "b", 9, make_room())
    assert found == same and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert direct.is_read_back and not plain.is_read_back


@pytest.mark.parametrize("kept", [100, 700_001, 2_000_000])
def test_a_partition_that_was_cut_off_is_completed(tmp_path: Path, kept: int) -> None:
    _, found = write(tmp_path / "a", 9, make_room())
    data = (tmp_path / "a").read_bytes()
    os.truncate(tmp_path / "a", kept)
    writer = PartitionWriter(tmp_path / "a", COLUMNS, room=make_room())
    blocks = writer.adopt(ROWS)
    assert blocks == kept // (ROWS * 1008)
    for number in range(blocks, 9):
        writer.write(ROWS, make_block(number))
    assert writer.close() == found and (tmp_path / "a").read_bytes() == data and writer.is_read_back


@pytest.mark.parametrize("when", ["before it is read back", "at the end"])
def test_what_the_disk_has_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A bit of a page is turned behind the writer's back."""
    monkeypatch.setattr(direct_file, "_READ_BACK_BYTES", 1 << 20)
    writer = PartitionWriter(tmp_path / "a", COLUMNS, room=make_room())
    for number in range(2 if when.startswith("before") else 9):
        writer.write(ROWS, make_block(number))
    with (tmp_path / "a").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    for number in range(2, 9 if when.startswith("before") else 2):
        writer.write(ROWS, make_block(number))
    with pytest.raises(GridError, match=r"a must have the checksum crc32:\w+. Received: crc32:\w+: the disk"):
        writer.close()


def test_a_file_system_that_only_reads_through_its_cache_is_read_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, refused = os.preadv, []

    def read_through_the_cache(descriptor: int, *arguments: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", read_through_the_cache)
    _, (size, _) = write(tmp_path / "a", 9, make_room())
    assert refused and (tmp_path / "a").stat().st_size == size


def test_a_full_disk_is_no_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = DirectFile(tmp_path / "file", make_room())
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append([memoryview(bytes(10_000))])


def test_small_blocks_go_through_the_cache(tmp_path: Path) -> None:
    writer = PartitionWriter(tmp_path / "a", COLUMNS, room=make_room())
    writer.write(2, {"x": np.zeros((2, 1000), np.uint8), "y": np.zeros(2, np.int64)})
    writer.close()
    assert not writer.is_read_back
