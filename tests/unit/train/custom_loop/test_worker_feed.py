"""Data of which each worker has a part of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from models import in_shards

import insitu
from insitu.base.errors import InputError
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.custom_loop import WorkerFeed, cut_for_replicas
from insitu.train.replica import ShardBatch


def rows_of(value: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in getattr(value, "values", (value,))]


def test_each_replica_takes_the_next_batch_until_none_is_left(strategy_over) -> None:
    contexts = []

    def make(context: Any) -> Any:
        contexts.append(context)
        data = tf.data.Dataset.range(7).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(4))

    data = strategy_over(2).distribute_datasets_from_function(make)
    for _epoch in range(2):
        assert [rows_of(step) for step in data] == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 2)
    assert data.element_spec == tf.TensorSpec((None,), "int64")
    with pytest.raises(InputError, match=r"divisible.*5 rows for 2"):
        context.get_per_replica_batch_size(5)
    with pytest.raises(TypeError, match="known size"):
        len(data)


def test_a_replica_whose_data_has_ended_takes_part_without_rows(strategy_over) -> None:
    def make(context: insitu.InputContext) -> Any:
        assert context.num_input_pipelines == 3
        return tf.data.Dataset.range(10 * (context.input_pipeline_id + 1)).batch(10)

    options = insitu.InputOptions(experimental_replication_mode=insitu.InputReplicationMode.PER_REPLICA)
    data = strategy_over(3).distribute_datasets_from_function(make, options)
    assert [[len(part) for part in rows_of(step)] for step in data] == [[10, 10, 10], [0, 10, 10], [0, 0, 10]]
    with pytest.raises(InputError, match="distribute_datasets_from_function"):
        strategy_over(3).experimental_distribute_dataset(tf.data.Dataset.range(3), options)


def test_a_worker_tells_the_function_which_part_is_its_own(monkeypatch) -> None:
    strategy = MultiWorkerMirroredStrategy(context=in_shards((1,), 2))
    monkeypatch.setattr(strategy, "_count_left", lambda own: own)
    object.__setattr__(strategy.membership.context, "workers", ("a:1", "b:2"))
    object.__setattr__(strategy.membership.context, "task", insitu.context().task.parse("worker:1"))
    made = []
    strategy.distribute_datasets_from_function(lambda c: made.append(c) or tf.data.Dataset.range(3).batch(1))
    assert made == [insitu.InputContext(2, 1, 2)]


def test_a_loop_goes_on_in_the_middle_of_a_workers_own_data(strategy_over) -> None:
    def make(_: Any) -> Any:
        return tf.data.Dataset.range(7).batch(2)

    options = insitu.InputOptions(experimental_replication_mode=insitu.InputReplicationMode.PER_REPLICA)
    strategy = strategy_over(2)
    for data in (
        strategy.distribute_datasets_from_function(make),
        strategy.distribute_datasets_from_function(make, options),
    ):
        whole = [rows_of(step) for step in data]
        data.load_state_dict({"epoch": 3, "step": 1})
        assert [rows_of(step) for step in data] == whole[1:]
    feed = strategy.distribute_datasets_from_function(make)._feed
    cut = WorkerFeed([feed._feeds[0]], (0, 1), lambda own: own, cut_for_replicas(2, 2, 0))
    steps = [[part.data.tolist() for part in step.parts if part.rows] for step in cut.steps(0, 0)]
    cut = WorkerFeed([feed._feeds[0]], (0, 1), lambda own: own, cut_for_replicas(2, 2, 0))
    later = [[part.data.tolist() for part in step.parts if part.rows] for step in cut.steps(0, 2)]
    assert later == steps[2:]


@pytest.mark.parametrize(("rows", "replicas"), [(8, 4), (7, 4), (3, 4), (6, 2)])
def test_batches_of_a_workers_own_are_cut_as_tensorflow_does(rows: int, replicas: int) -> None:
    from tensorflow.python.data.experimental.ops.distribute import batch_sizes_for_worker

    taken = []
    for worker in (0, 1):  # of half of the replicas each
        cut = cut_for_replicas(rows, replicas, worker * replicas // 2)
        data = np.arange(rows)
        parts = list(cut(ShardBatch(0, rows, data)))
        sizes = batch_sizes_for_worker(rows, 2, replicas // 2, worker).numpy().tolist()
        assert [part.rows for part in parts] == [size for size in sizes if size]
        np.testing.assert_array_equal(np.concatenate([part.data for part in parts]), data)
        taken.append(sizes)
    whole = cut_for_replicas(rows, replicas, 0)
    assert [p.data.tolist() for p in whole(ShardBatch(0, 1, np.array([5])))] == [[5]]


def test_values_are_made_for_each_replica(strategy_over) -> None:
    strategy = strategy_over(2)

    def make(context: Any) -> Any:
        return {
            "id": context.replica_id_in_sync_group,
            "of": np.full(3, context.num_replicas_in_sync, "int32"),
        }

    values = strategy.experimental_distribute_values_from_function(make)
    assert [int(value["id"]) for value in strategy.experimental_local_results(values)] == [0, 1]
    found = strategy.run(lambda v: v["id"] + tf.reduce_sum(v["of"]), (values,))
    assert [int(value) for value in found.values] == [6, 7]
    alone = strategy_over(1).experimental_distribute_values_from_function(lambda c: tf.constant(3))
    assert int(alone) == 3


def test_rows_are_those_of_the_batch_wherever_it_stands(strategy_over) -> None:
    """Values and constants with axes of their own are no rows of the step."""
    losses = np.arange(1, 6, dtype="float32")
    table = np.ones(7, "float32")
    for shards in (1, 2, 3):
        strategy = strategy_over(shards)
        (batch,) = strategy.distribute_dataset(tf.data.Dataset.from_tensors(losses))
        own = strategy.experimental_distribute_values_from_function(lambda c: table)

        def step(table: Any, own: Any, batch: Any) -> Any:
            return tf.nn.compute_average_loss(batch * table[0] * own[0])

        total = strategy.reduce("sum", strategy.run(step, (table, own, batch)))
        assert float(total) == pytest.approx(3.0)


def test_rows_of_a_loss_may_be_more_than_those_of_the_batch(strategy_over) -> None:
    """As where each token has a loss: the mean is over them, as in TensorFlow."""
    losses = np.arange(20, dtype="float32").reshape(5, 4)
    for shards in (1, 2, 3):
        strategy = strategy_over(shards)
        (batch,) = strategy.distribute_dataset(tf.data.Dataset.from_tensors(losses))
        step = strategy.run(
            lambda x: (tf.nn.compute_average_loss(tf.reshape(x, (-1,))), tf.nn.compute_average_loss(x)),
            (batch,),
        )
        by_token, by_row = (float(value) for value in strategy.reduce("sum", step))
        assert by_token == pytest.approx(losses.mean()) and by_row == pytest.approx(losses.sum() / 5)
        average = strategy.compute_average_loss
        found = strategy.run(lambda x, average=average: average(tf.reshape(x, (-1,))), (batch,))
        assert float(strategy.reduce("sum", found)) == pytest.approx(losses.mean())


def test_options_that_change_nothing_are_taken(strategy_over) -> None:
    options = insitu.InputOptions(experimental_fetch_to_device=False, experimental_per_replica_buffer_size=3)
    data = strategy_over(2).distribute_dataset(tf.data.Dataset.range(2).batch(2), options)
    found = strategy_over(2).run(lambda x: x + 1, tuple(data), options=insitu.RunOptions(False, True))
    assert rows_of(found) == [[1], [2]]
    with pytest.raises(InputError, match="place_dataset_on_device"):
        insitu.InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(InputError, match="experimental_xla_options"):
        strategy_over(1).run(lambda: 1, options=tf.distribute.RunOptions(experimental_xla_options="x"))


def test_a_dataset_that_is_never_sharded_is_a_workers_own(monkeypatch) -> None:
    strategy = MultiWorkerMirroredStrategy(context=in_shards((1,), 2))
    monkeypatch.setattr(strategy, "_count_left", lambda own: own)
    object.__setattr__(strategy.membership.context, "workers", ("a:1", "b:2"))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = tf.data.Dataset.range(9).batch(4).with_options(options)
    steps = list(strategy.experimental_distribute_dataset(data)._feed.steps(0, 0))
    # Each step takes as much as this worker's part of a global batch.
    assert [step.parts[0].data.tolist() for step in steps] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
