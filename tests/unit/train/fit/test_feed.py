"""Steps: every row of the data once an epoch, in the shard where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.errors import InputError
from insitu.train.fit.feed import ArraySource, StreamFeed


def rows_by_shard(
    rows: int, batch: int, num_shards: int, *, shuffle: bool, epoch: int = 0
) -> list[list[int]]:
    source = ArraySource((np.arange(rows),), batch, shuffle, 3)
    feed = StreamFeed(source, source.num_steps, range(num_shards), num_shards)
    seen: list[list[int]] = [[] for _ in range(num_shards)]
    for step in feed.steps(epoch, 0):
        for part in step.parts:
            assert part.rows == (0 if part.data is None else len(part.data[0]))
            if part.data is not None:
                seen[part.shard] += part.data[0].tolist()
    return seen


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_every_row_once(rows, batch, num_shards, shuffle):
    seen = rows_by_shard(rows, batch, num_shards, shuffle=shuffle)
    assert sorted(row for shard in seen for row in shard) == list(range(rows))


def test_a_shard_gets_the_same_rows_whoever_hosts_it():
    alone = rows_by_shard(50, 8, 2, shuffle=True, epoch=4)
    source = ArraySource((np.arange(50),), 8, True, 3)
    for shard in (0, 1):
        feed = StreamFeed(source, source.num_steps, [shard], 2)
        parts = [step.parts[0] for step in feed.steps(4, 0)]
        assert [r for p in parts if p.data is not None for r in p.data[0].tolist()] == alone[shard]


def test_the_order_of_an_epoch_is_pinned():
    # Runs are compared across versions, so that the order may not change by accident.
    source = ArraySource((np.arange(8),), 8, True, 3)
    assert next(source(0))[0].tolist() == [4, 1, 6, 7, 0, 5, 2, 3]
    assert next(source(1))[0].tolist() != next(source(0))[0].tolist()


def test_only_a_last_batch_may_leave_replicas_without_rows():
    def feed(*sizes: int) -> StreamFeed:
        return StreamFeed(lambda epoch: (np.zeros(n) for n in sizes), len(sizes), (0,), 3)

    for sizes in ((3, 1), (2,)):
        assert len(feed(*sizes).example()) == 1
    with pytest.raises(InputError, match=r"each of the 3 replicas\. Received: a batch of 2"):
        feed(2, 2).example()
