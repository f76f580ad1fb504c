"""TensorFlow's own functions in a step that insitu runs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import TrainingError

LOSSES = np.arange(5, dtype="float32")


def summed(strategy: Any, step: Any) -> Any:
    (batch,) = strategy.distribute_dataset(tf.data.Dataset.from_tensors(LOSSES))
    return strategy.reduce("sum", strategy.run(step, (batch,)))


def test_losses_are_scaled_as_on_one_device(strategy_over) -> None:
    def step(losses: Any) -> Any:
        return (
            tf.nn.compute_average_loss(losses),
            tf.nn.compute_average_loss(losses, sample_weight=losses),
            tf.nn.compute_average_loss(losses, global_batch_size=10),
            tf.nn.scale_regularization_loss(tf.constant(3.0)),
        )

    wanted = [float(value) for value in step(tf.constant(LOSSES))]
    for shards in (1, 2, 3):  # five rows: replicas have unequal parts
        found = [float(value) for value in summed(strategy_over(shards), step)]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_step_asks_tensorflow_for_strategy_and_replica(strategy_over) -> None:
    strategy = strategy_over(2)

    def step(losses: Any) -> Any:
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        replica = tf.distribute.get_replica_context()
        return tf.reduce_sum(losses) / replicas, replica.replica_id_in_sync_group

    total, ids = summed(strategy, step)
    assert (float(total), int(ids)) == (5.0, 1)
    assert tf.distribute.get_strategy().num_replicas_in_sync == 1
    assert not tf.distribute.has_strategy()


def test_a_raw_variable_is_not_assigned_by_replicas(strategy_over) -> None:
    strategy, counter = strategy_over(2), tf.Variable(1.0, name="counter")
    for assign in (lambda: counter.assign_add(1.0), lambda: counter.assign(3.0)):
        with pytest.raises(TrainingError, match=r"tf\.Variable 'counter:0'.*keras\.Variable"):
            summed(strategy, lambda x, assign=assign: assign() * x)
    assert float(counter) == 1 and float(counter.assign_add(1.0)) == 2


def test_moments_of_all_replicas_are_refused(strategy_over) -> None:
    x, y = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")

    def make(strategy: Any) -> Any:
        with strategy.scope():
            normalize = keras.layers.BatchNormalization(synchronized=True, name="norm")
            model = keras.Sequential([keras.Input((3,)), normalize, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    strategy = strategy_over(2)
    model = make(strategy)
    with pytest.raises(TrainingError, match=r"Received: BatchNormalization\(synchronized=True\) as 'norm'"):
        model.fit(x, y, batch_size=4, verbose=0)
    with pytest.raises(TrainingError, match=r"Received: moments with synchronized=True"):
        strategy.run(lambda rows: model(rows, training=True), (x,))
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    make(strategy_over(1)).fit(x, y, batch_size=4, verbose=0)
