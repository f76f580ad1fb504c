"""Shared memory for single requests."""

from __future__ import annotations

import numpy as np

from insitu.parameters.worker_buffers import Arena


def test_blocks_are_allocated_and_freed():
    arena = Arena(1 << 16)
    kind = np.dtype("f4")
    first, second = arena.allocate([((100,), kind), ((7, 3), kind)]), arena.allocate([((8000,), kind)])
    assert first is not None and second is not None
    assert [array.shape for array in first.arrays] == [(100,), (7, 3)]
    first.arrays[1][...] = 1
    second.arrays[0][...] = 2
    assert (first.arrays[1] == 1).all()
    assert arena.allocate([((10_000,), kind)]) is None
    first.free()
    second.free()
    assert arena.allocated_bytes == 0
    whole = arena.allocate([((1 << 14,), kind)])
    assert whole is not None
    whole.free()
    whole.free()
    assert arena.allocated_bytes == 0
    arena.close()


def test_a_detached_array_frees_its_block_with_its_last_view():
    arena = Arena(1 << 12)
    kind = np.dtype("f4")
    allocation = arena.allocate([((8,), np.dtype("i8")), ((100,), kind)])
    assert allocation is not None
    handed = allocation.detach(1)
    allocation.free()
    handed[...] = 3
    view = handed.reshape(10, 10)[2:]
    del handed, allocation
    assert arena.allocated_bytes == 512
    assert arena.allocate([((900,), kind)]) is None
    assert (view == 3).all()
    del view
    assert arena.allocated_bytes == 0
    allocation = arena.allocate([((1000,), kind)])
    assert allocation is not None
    copy = allocation.detach(0)  # most of it is lent
    allocation.free()
    assert arena.allocated_bytes == 0
    assert copy.shape == (1000,)
    arena.close()
