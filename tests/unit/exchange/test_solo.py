"""The group of one process."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.exchange.joining import SoloTransport
from insitu.exchange.plan.transport import Members, Reduction


@given(st.integers(1, 5), st.sampled_from([1, 100, 65_536, 65_537]))
def test_rows_are_summed_in_shard_order(shards: int, length: int) -> None:
    rows = np.random.default_rng(length).standard_normal((shards, length)).astype(np.float32)
    want = rows[0].copy()
    for row in rows[1:]:
        want += row
    transport = SoloTransport(Members(0, (tuple(range(shards)),), shards))
    reduction = Reduction("sum", rows.dtype, length, tuple(rows), rows[0])
    assert transport.prepare(reduction)(None)
    assert rows[0].tobytes() == want.tobytes()


def test_zero_weights_change_nothing() -> None:
    row = np.ones(3)
    run = SoloTransport(Members(0, ((0,),), 1)).prepare(Reduction("weighted_mean", row.dtype, 3, (row,), row))
    assert not run([0.0])
    assert (row == 1).all()


def test_kept_buffers_are_returned_unchanged() -> None:
    transport = SoloTransport(Members(0, ((0,),), 1))
    buffer = transport.allocate(10)
    assert not buffer.any()
    assert transport.allocate(10, buffer) is buffer
