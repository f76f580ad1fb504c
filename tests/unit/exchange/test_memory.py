"""Shared segments."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import ExchangeError
from insitu.exchange import memory
from tests.support.descriptors import find_new_descriptors, list_descriptors

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")


@pytest.fixture
def file() -> int:
    """The descriptor of a segment of 10,000 bytes."""
    return memory.create("insitu-test", 10_000)


def test_segment_can_be_opened_by_its_owner_only(file: int) -> None:
    assert os.fstat(file).st_mode & 0o777 == 0o600
    os.close(file)


def test_a_segment_is_freed_when_the_process_has_emptied_its_module(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's buffer may be the last to go: it printed "'NoneType' object has no attribute 'munmap'"."""
    segment = memory.adopt(file, 10_000)
    monkeypatch.setattr(memory, "os", None)
    monkeypatch.setattr(memory, "_libc", None)
    segment.__del__()
    assert (segment.file, segment.address) == (-1, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_attached_segments_share_memory_until_one_is_private(file: int) -> None:
    memory.fill(file, np.full(10_000, 5, np.uint8))
    one, other = (memory.adopt(os.dup(file), 10_000) for _ in range(2))
    os.close(file)
    array, address = one.array(), one.address
    other.array()[:10] = 6
    assert (array[:10] == 6).all() and (array[10:] == 5).all()
    one.make_private()
    other.array()[:] = 7
    assert (array[:10] == 6).all() and one.address == address


def test_segment_replaces_the_memory_of_an_array(file: int) -> None:
    array = memory.Segment(memory.create("insitu-test", 10_000), 10_000).array()
    segment = memory.adopt(os.dup(file), 10_000, array)
    segment.array()[:] = 3
    assert segment.array() is array
    assert os.pread(file, 3, 0) == b"\3\3\3"
    os.close(file)


def test_segment_that_is_too_small_raises(file: int) -> None:
    with pytest.raises(ExchangeError, match=r"must have 20000 bytes. Received: 10000 bytes"):
        memory.adopt(os.dup(file), 20_000)
    os.close(file)


def test_the_size_of_a_segment_cannot_change(file: int) -> None:
    """Cut off under those who have mapped it, it would end them with SIGBUS."""
    for size in (0, 20_000):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    os.close(file)


def test_only_sealed_segments_are_adopted(tmp_path: Path) -> None:
    """A file that a peer has open, or memory that it could cut off, isn't mapped."""
    (tmp_path / "file").write_bytes(bytes(10_000))
    loose = os.memfd_create("insitu-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 10_000)
    here, there = os.pipe()
    files = os.open(tmp_path / "file", os.O_RDWR), loose, here
    before = list_descriptors()
    for file in files:
        with pytest.raises(ExchangeError, match="a segment with a sealed size"):
            memory.adopt(file, 10_000)
    now = list_descriptors()
    for file in files:
        assert now.get(file) != before[file]
    assert find_new_descriptors(before, *(before[file] for file in files)) == []
    os.close(there)


def test_adopted_segments_have_locks_of_their_own(file: int) -> None:
    """A descriptor that was handed over shares the sender's locks, and so would exclude nobody."""
    one, other = (memory.adopt(os.dup(file), 10_000) for _ in range(2))
    fcntl.flock(one.file, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(file)
