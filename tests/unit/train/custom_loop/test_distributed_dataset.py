"""The iterable of a custom loop."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exchange_ranks import in_threads
from models import in_shards

import insitu.exchange
from insitu.base.errors import InputError
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.custom_loop import DistributedDataset, check_same_place
from insitu.train.elastic import LOOP, LoopPosition


def test_a_custom_loop_iterates_this_replicas_part(strategy_over):
    data = tf.data.Dataset.range(10).batch(4)
    mine = strategy_over(1).distribute_dataset(data)
    assert len(mine) == 3
    for _epoch in range(2):
        assert [np.asarray(part).tolist() for part in mine] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    second = MultiWorkerMirroredStrategy(context=in_shards((0,), 2))
    parts = iter(second.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4))._feed.steps(0, 0))
    # The last global batch has one row, and the first replica's slice of it is empty.
    assert [part.parts[0].rows for part in parts] == [2, 2, 0]
    both = strategy_over(2).distribute_dataset(data.filter(lambda x: True))
    assert [[np.asarray(v).tolist() for v in part.values] for part in both] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8], [9]],
    ]
    # As with tf.distribute, so that list() and progress bars do without.
    with pytest.raises(TypeError, match="known size"):
        len(both)
    assert len(list(both)) == 3


def test_an_iterator_has_the_methods_of_tensorflows(strategy_over):
    data = strategy_over(1).distribute_dataset(tf.data.Dataset.range(5).batch(4))
    assert data.element_spec == tf.TensorSpec((None,), "int64")
    iterator = iter(data)
    assert iterator.element_spec == data.element_spec
    assert np.asarray(iterator.get_next()).tolist() == [0, 1, 2, 3]
    last, end = iterator.get_next_as_optional(), iterator.get_next_as_optional()
    assert last.has_value() and np.asarray(last.get_value()).tolist() == [4]
    assert not end.has_value()
    with pytest.raises(InputError, match=r"has_value\(\)"):
        end.get_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_batches_are_tensors_as_tensorflows_are(strategy_over):
    data = strategy_over(2).distribute_dataset(tf.data.Dataset.range(5).batch(4))
    first = next(iter(data))
    assert [type(value) for value in first.values] == [type(tf.constant(1))] * 2
    assert first.values[0].numpy().tolist() == [0, 1]


def test_processes_compare_the_batches_of_a_loop(strategy_over, monkeypatch):
    strategy = strategy_over(2)
    monkeypatch.setattr(type(strategy), "_compares_data", True)
    options = {**strategy.membership.feed_options, "several_processes": True}
    monkeypatch.setattr(type(strategy.membership), "feed_options", options)
    data = tf.data.Dataset.range(10).batch(4)
    assert len(list(strategy.distribute_dataset(data))) == 3
    group, checked = strategy.group(), []
    gather = group.all_gather

    def of_other_data(row):
        rows = gather(row)
        if rows.dtype == "float64":
            checked.append(rows[0, 0])
            rows[1] += len(checked) > 1
        return rows

    monkeypatch.setattr(group, "all_gather", of_other_data)
    seen = []
    with pytest.raises(InputError, match=r"must be given the same data.*another batch than that of shard 0"):
        seen.extend(strategy.distribute_dataset(data))
    assert checked[0] != checked[1]


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(10).shuffle(10, seed=1).batch(4)


def parts_of(step) -> list[list[int]]:
    return [np.asarray(value).tolist() for value in step.values]


def test_a_loop_goes_on_in_the_middle_of_an_epoch(strategy_over):
    tf.random.set_seed(1)
    first = strategy_over(2).distribute_dataset(shuffled())
    epochs = [[parts_of(step) for step in first] for _ in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    assert first.state_dict() == {"epoch": 4, "step": 0}

    second = strategy_over(2).distribute_dataset(shuffled())
    second.load_state_dict({"epoch": 1, "step": 2})
    iterator = iter(second)
    assert parts_of(next(iterator)) == epochs[1][2]
    assert second.state_dict() == {"epoch": 1, "step": 3}
    # An iterator that the script keeps is over once the next one begins.
    again = iter(second)
    assert parts_of(next(again)) == epochs[2][0]
    assert second.state_dict() == {"epoch": 2, "step": 1}
    del iterator
    assert second.state_dict() == {"epoch": 2, "step": 1}
    second.set_epoch(3)
    assert [parts_of(step) for step in second] == epochs[3]
    second.set_epoch(0)
    with pytest.raises(InputError, match=r"goes forward only.*4 epochs back"):
        next(iter(second))


def test_arrays_are_read_at_any_epoch(strategy_over):
    data = strategy_over(2).distribute_dataset(np.arange(40))
    for epoch in (2, 0):
        data.load_state_dict({"epoch": epoch, "step": 1})
        assert [parts_of(step) for (step,) in data] == [[[32, 33, 34, 35], [36, 37, 38, 39]]]


def test_data_is_a_part_of_tensorflows_checkpoints(strategy_over, tmp_path):
    first = strategy_over(2).distribute_dataset(shuffled())
    assert isinstance(first, DistributedDataset) and type(first).__name__ == "DistributedDataset"
    list(first)
    next(iterator := iter(first))
    path = tf.train.Checkpoint(data=first).save(str(tmp_path / "loop"))
    del iterator
    second = strategy_over(2).distribute_dataset(shuffled())
    checkpoint = tf.train.Checkpoint(data=second)
    checkpoint.restore(path).assert_consumed()
    assert second.state_dict() == {"epoch": 1, "step": 1}
    assert len(list(second)) == 2


def test_tasks_at_different_places_are_named():
    def task(index, addresses):
        with insitu.exchange.join(index, addresses, shards=(index,), num_shards=2, timeout=40.0) as group:
            check_same_place(group, LoopPosition(0, LOOP, epoch=2, step=5))
            with pytest.raises(InputError, match="in each task") as raised:
                check_same_place(group, LoopPosition(0, LOOP, epoch=2 * index, step=index))
            return str(raised.value)

    for told in in_threads(2, task):
        assert "epoch 0, step 0 in shard 0; epoch 2, step 1 in shard 1" in told
