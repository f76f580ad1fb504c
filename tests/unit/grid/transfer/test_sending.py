"""Staged partitions are sent to their owners."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from partition_servers import SECRET

from insitu.errors import TransferError
from insitu.grid.partitions import file_checksum
from insitu.grid.transfer import PartitionServer, send_partition
from insitu.paths import Paths


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "staged"
    path.write_bytes(os.urandom(9 << 20))
    return path


def send(file: Path, server: PartitionServer) -> list[int]:
    """Send the file as partition 2. Returns how many bytes were there at each report."""
    sizes: list[int] = []
    send_partition(
        file,
        "c",
        "1-x",
        2,
        file_checksum(file),
        server.address,
        SECRET,
        progress=lambda done, _: sizes.append(done),
    )
    return sizes


def test_a_partition_arrives_whole(server: PartitionServer, paths: Paths, file: Path):
    sizes = send(file, server)
    staged = paths.staged("c", "1-x").partition("node-0", 2)
    assert staged.read_bytes() == file.read_bytes()
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == 9 << 20
    send_partition(file, "c", "1-x", 2, file_checksum(file), server.address, SECRET)


def test_what_is_there_is_not_sent_again(server: PartitionServer, paths: Paths, file: Path):
    partial = paths.staged("c", "1-x").partition("node-0", 2).with_suffix(".partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(file.read_bytes()[: 5 << 20])
    sizes = send(file, server)
    assert sizes[0] == 5 << 20 and partial.with_suffix(".arrow").read_bytes() == file.read_bytes()


def test_a_file_that_is_not_what_was_announced_is_refused(server: PartitionServer, file: Path):
    with pytest.raises(TransferError, match=r"Partition 2 of c can't be sent: .*checksum"):
        send_partition(file, "c", "1-x", 2, "crc32:00000000", server.address, SECRET)
