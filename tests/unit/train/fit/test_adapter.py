"""A feed as Keras sees it: iterations that start where the position is."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras.src.trainers import data_adapters

from insitu.errors import InputError
from insitu.train.fit.adapter import FeedAdapter, register_dataset_adapter
from insitu.train.fit.feed import StreamFeed
from insitu.train.fit.sources import make_feed


@given(st.integers(0, 6), st.integers(0, 2))
def test_starting_in_the_middle_skips_what_was_done(start, epoch):
    feed = make_feed(np.arange(40), batch_size=6, shuffle=True, shards=(0, 1), num_shards=2)
    adapter = FeedAdapter(feed, start=lambda: (epoch, start))
    steps = list(adapter)
    assert [s.skipped for s in steps] == [i < start for i in range(7)]
    whole = list(feed.steps(epoch, 0))
    for ours, theirs in zip(steps[start:], whole[start:], strict=True):
        assert [p.rows for p in ours.parts] == [p.rows for p in theirs.parts]
        np.testing.assert_array_equal(ours.parts[0].data[0], theirs.parts[0].data[0])


def test_steps_per_epoch_repeats_the_data_without_end():
    feed = make_feed(np.arange(6), batch_size=2, shards=(0,), num_shards=1)
    adapter = FeedAdapter(feed, 2, lambda: (1, 1))
    steps = iter(adapter)
    assert next(steps).skipped
    rows = [next(steps).parts[0].data[0].tolist() for _ in range(4)]
    assert rows == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_steps_per_epoch_needs_a_length():
    feed = StreamFeed(lambda epoch: iter(()), None, (0,), 1)
    with pytest.raises(InputError, match="steps_per_epoch needs data of known length"):
        FeedAdapter(feed, steps_per_epoch=3)
    with pytest.raises(InputError, match="at least one batch"):
        feed.example()


def test_an_iteration_starts_where_the_position_is_when_its_first_step_is_asked_for():
    feed = make_feed(np.arange(6), batch_size=2, shards=(0,), num_shards=1)
    position = [(0, 0)]
    steps = iter(FeedAdapter(feed, start=lambda: position[-1]))
    position.append((0, 2))
    assert [step.skipped for step in steps] == [True, True, False]


def test_steps_are_of_the_shards_that_were_assigned_last():
    feed = make_feed(np.arange(8), batch_size=4, shards=(0,), num_shards=2)
    adapter = FeedAdapter(feed)
    steps = iter(adapter)
    assert next(steps).shards == (0,)
    adapter.assign_shards((0, 1))
    assert adapter.step_at(0, 0).shards == (0, 1)
    step = next(steps)
    assert step.shards == (0, 1)
    assert [part.data[0].tolist() for part in step.parts] == [[4, 5], [6, 7]]


def test_the_dataset_adapter_is_registered_once():
    register_dataset_adapter()
    registered = data_adapters.get_data_adapter
    register_dataset_adapter()
    assert data_adapters.get_data_adapter is registered
    adapter = data_adapters.get_data_adapter(np.arange(6), batch_size=4)
    assert not isinstance(adapter, FeedAdapter)
    assert keras.tree.flatten(next(iter(adapter.get_numpy_iterator())))[0].tolist() == [0, 1, 2, 3]
