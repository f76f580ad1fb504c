"""Steps: every row of the data once an epoch, in the shard where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.errors import InputError
from insitu.train.fit.adapter import FeedAdapter
from insitu.train.fit.feed import ArraySource, StreamFeed
from insitu.train.fit.sources import make_feed


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


@given(st.integers(0, 6), st.integers(0, 2))
def test_starting_in_the_middle_skips_what_was_done(start, epoch):
    feed = make_feed(np.arange(40), batch_size=6, shuffle=True, shards=(0, 1), num_shards=2)
    adapter = FeedAdapter(feed)
    adapter.position = (epoch, start)
    steps = list(adapter)
    assert [s.skipped for s in steps] == [i < start for i in range(7)]
    whole = list(feed.steps(epoch, 0))
    for ours, theirs in zip(steps[start:], whole[start:], strict=True):
        assert [p.rows for p in ours.parts] == [p.rows for p in theirs.parts]
        np.testing.assert_array_equal(ours.parts[0].data[0], theirs.parts[0].data[0])


def test_steps_per_epoch_repeats_the_data_without_end():
    feed = make_feed(np.arange(6), batch_size=2, shards=(0,), num_shards=1)
    adapter = FeedAdapter(feed, steps_per_epoch=2)
    adapter.position = (1, 1)
    steps = iter(adapter)
    assert next(steps).skipped
    rows = [next(steps).parts[0].data[0].tolist() for _ in range(4)]
    assert rows == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_a_tf_dataset_and_a_py_dataset_are_streams_of_global_batches():
    import keras
    import tensorflow as tf

    class Four(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int):
            return np.arange(4) + 4 * index, np.zeros(4)

    for data in (Four(), tf.data.Dataset.from_tensor_slices((np.arange(8), np.zeros(8))).batch(4)):
        feed = make_feed(data, shards=(1,), num_shards=2)
        assert feed.num_steps == 2
        assert [s.parts[0].data[0].tolist() for s in feed.steps(0, 0)] == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((0, 2))}, "at least one"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "same number of rows"),
        ({"x": np.zeros((3, 2)), "batch_size": 1}, "a batch of 1"),
        ({"x": object()}, "Received: object"),
        ({"x": iter(())}, "Received: tuple_iterator"),
    ],
)
def test_bad_data_says_what_was_received(arguments, message):
    with pytest.raises(InputError, match=message):
        make_feed(**arguments, shards=(0, 1), num_shards=2)


def test_steps_per_epoch_needs_a_length():
    feed = StreamFeed(lambda epoch: iter(()), None, (0,), 1)
    with pytest.raises(InputError, match="steps_per_epoch"):
        FeedAdapter(feed, steps_per_epoch=3)
    with pytest.raises(InputError, match="at least one batch"):
        feed.example()


def test_only_a_last_batch_may_leave_replicas_without_rows():
    def feed(*sizes: int) -> StreamFeed:
        return StreamFeed(lambda epoch: (np.zeros(n) for n in sizes), len(sizes), (0,), 3)

    for sizes in ((3, 1), (2,)):
        assert len(feed(*sizes).example()) == 1
    with pytest.raises(InputError, match=r"each of the 3 replicas\. Received: a batch of 2"):
        feed(2, 2).example()
