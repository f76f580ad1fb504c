"""Shared segments."""

from __future__ import annotations

import os

import numpy as np
import pytest

from insitu.errors import ExchangeError
from insitu.exchange import memory

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")


@pytest.fixture
def file() -> int:
    """The descriptor of a segment of 10,000 bytes."""
    return memory.create("insitu-test", 10_000)


def test_segment_can_be_opened_by_its_owner_only(file: int) -> None:
    assert os.fstat(file).st_mode & 0o777 == 0o600
    os.close(file)


def test_attached_segments_share_memory_until_one_is_private(file: int) -> None:
    memory.fill(file, np.full(10_000, 5, np.uint8))
    one, other = (memory.attach(os.getpid(), file, 10_000) for _ in range(2))
    os.close(file)
    array, address = one.array(), one.address
    other.array()[:10] = 6
    assert (array[:10] == 6).all() and (array[10:] == 5).all()
    one.make_private()
    other.array()[:] = 7
    assert (array[:10] == 6).all() and one.address == address


def test_segment_replaces_the_memory_of_an_array(file: int) -> None:
    array = memory.Segment(memory.create("insitu-test", 10_000), 10_000).array()
    segment = memory.attach(os.getpid(), file, 10_000, array)
    segment.array()[:] = 3
    assert segment.array() is array
    assert os.pread(file, 3, 0) == b"\3\3\3"
    os.close(file)


def test_segment_that_is_too_small_or_closed_raises(file: int) -> None:
    with pytest.raises(ExchangeError, match=r"must have 20000 bytes. Received: 10000 bytes"):
        memory.attach(os.getpid(), file, 20_000)
    os.close(file)
    with pytest.raises(ExchangeError, match="Received: No such file or directory"):
        memory.attach(os.getpid(), file, 10_000)
