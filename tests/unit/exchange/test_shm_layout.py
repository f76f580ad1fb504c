"""Offsets in shared memory."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.exchange import memory
from insitu.exchange.shm_barrier import LINE, count_barrier_bytes
from insitu.exchange.shm_layout import SLOT_BYTES, Region, SegmentLayout, round_up


@given(st.integers(1, 300), st.integers(0, 300))
def test_sections_do_not_overlap(members: int, shards: int) -> None:
    layout = SegmentLayout(members, shards)
    assert layout.mismatch_barrier >= count_barrier_bytes(members)
    assert layout.weights >= layout.mismatch_barrier + count_barrier_bytes(members)
    assert layout.progress >= layout.weights + 2 * 8 * shards
    assert layout.directory >= layout.progress + LINE * members
    assert layout.scratch % 4096 == 0
    assert layout.size == layout.slots + 2 * shards * SLOT_BYTES
    offsets = [layout.weights, layout.progress, layout.directory, layout.scratch, layout.common, layout.slots]
    assert offsets == sorted(offsets)
    assert all(offset % LINE == 0 for offset in offsets)


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_round_up_gives_the_next_multiple(size: int, unit: int) -> None:
    rounded = round_up(size, unit)
    assert rounded % unit == 0 and size <= rounded < size + unit


def test_region_finds_arrays_in_this_members_part() -> None:
    file = memory.create("insitu-test", 8192)
    segment = memory.adopt(os.dup(file), 8192)
    os.close(file)
    region = Region((segment.array(),), segment, 8192)
    assert region.find_offset(segment.array()[64:128]) == 64
    assert region.find_offset(np.zeros(10)) is None
