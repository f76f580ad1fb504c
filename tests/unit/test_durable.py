"""Files that survive a power cut."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from insitu import durable
from insitu.durable import write_pages


def pages(size: int) -> memoryview:
    memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory[:size] = np.random.default_rng(size).bytes(size)
    return memoryview(memory)


@pytest.mark.parametrize("size", [1, 4096, 5000, (1 << 20) - 1, (1 << 20) + 1, (33 << 20) + 17])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_file_has_the_bytes_and_no_more(tmp_path: Path, place: str, size: int):
    path = (tmp_path if place == "disk" else Path("/dev/shm")) / f"insitu-test-{os.getpid()}"
    data = pages(size)
    try:
        write_pages(path, data, size)
        assert path.read_bytes() == data[:size]
    finally:
        path.unlink()


def test_a_file_system_that_cannot_go_past_its_cache_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, flags_seen = os.write, []

    def picky(descriptor: int, data: memoryview) -> int:
        flags = durable.fcntl.fcntl(descriptor, durable.fcntl.F_GETFL)
        flags_seen.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data[: 3 << 20])

    monkeypatch.setattr(durable.os, "write", picky)
    data = pages(8 << 20)
    write_pages(tmp_path / "file", data, (8 << 20) - 5)
    assert (tmp_path / "file").read_bytes() == data[: (8 << 20) - 5]
    assert flags_seen == [True, False, False, False]


def test_what_goes_wrong_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write_pages(tmp_path / "file", pages(8), 8)
