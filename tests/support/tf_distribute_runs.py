"""Runs the same code under tf.distribute.MirroredStrategy and under insitu's, over two virtual devices, and
prints as JSON what both gave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import insitu

insitu.config.set_virtual_devices(2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")


def values(strategy: Any, structure: Any) -> Any:
    local = strategy.experimental_local_results(structure)
    return [[np.asarray(leaf).tolist() for leaf in tf.nest.flatten(value)] for value in local]


def distributed_batches(strategy: Any, of: Any) -> Any:
    data = tf.data.Dataset.range(10).batch(4)
    return [values(strategy, batch) for batch in strategy.experimental_distribute_dataset(data)]


def batches_from_a_function(strategy: Any, of: Any) -> Any:
    contexts = []

    def make(context: Any) -> Any:
        contexts.append(
            [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        )
        data = tf.data.Dataset.range(11).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(8))

    data = strategy.distribute_datasets_from_function(make)
    return [values(strategy, batch) for _ in range(2) for batch in data], contexts


def batches_of_each_replica(strategy: Any, of: Any) -> Any:
    options = of.InputOptions(experimental_replication_mode=of.InputReplicationMode.PER_REPLICA)

    def make(context: Any) -> Any:
        return tf.data.Dataset.range(4 + 4 * context.input_pipeline_id).batch(2)

    data = strategy.distribute_datasets_from_function(make, options)
    return [values(strategy, batch) for batch in data]


def values_from_a_function(strategy: Any, of: Any) -> Any:
    made = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10 * context.replica_id_in_sync_group + context.num_replicas_in_sync)
    )
    result = strategy.run(lambda value: value * 2, args=(made,))
    return values(strategy, result), int(strategy.reduce(of.ReduceOp.SUM, result, axis=None))


def reduced_and_gathered(strategy: Any, of: Any) -> Any:
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X[:6]))
    result = strategy.run(lambda x: (tf.reduce_sum(x), x), args=(batch,))
    return [
        float(strategy.reduce("SUM", result[0], axis=None)),
        float(strategy.reduce(of.ReduceOp.MEAN, result[0], axis=None)),
        strategy.reduce(of.ReduceOp.SUM, result[1], axis=0).numpy().tolist(),
        strategy.reduce(of.ReduceOp.MEAN, result[1], axis=0).numpy().tolist(),
        strategy.gather(result[1], axis=0).numpy().tolist(),
    ]


def places(strategy: Any, of: Any) -> Any:
    def step(x: Any) -> Any:
        context = of.get_replica_context()
        inside = [of.in_cross_replica_context(), of.has_strategy(), context.num_replicas_in_sync]
        return context.replica_id_in_sync_group, tf.constant(inside, tf.int32) + tf.cast(x[0], tf.int32) * 0

    with strategy.scope():
        outside = [of.in_cross_replica_context(), of.has_strategy(), of.get_replica_context() is None]
    outer = [of.in_cross_replica_context(), of.has_strategy(), of.get_replica_context() is None]
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X[:2, 0]))
    ids, inside = strategy.run(step, args=(batch,))
    return outside, outer, values(strategy, ids), values(strategy, inside)


def trained_by_hand(strategy: Any, of: Any) -> Any:
    """Losses of unequal weights and a regularizer; batches that replicas share equally, as TensorFlow's
    definition of a mean needs."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))]
        )
        optimizer = keras.optimizers.SGD(0.1)
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(4)
    )

    def step(inputs: Any) -> Any:
        x, y = inputs
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum((model(x, training=True) - y) ** 2, 1)
            loss = tf.nn.compute_average_loss(rows, sample_weight=x[:, 0] ** 2)
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(inputs: Any) -> Any:
        return strategy.reduce(of.ReduceOp.SUM, strategy.run(step, args=(inputs,)), axis=None)

    losses = [float(train(inputs)) for _ in range(2) for inputs in data]
    return losses, [weight.tolist() for weight in model.get_weights()]


def accumulated_by_hand(strategy: Any, of: Any) -> Any:
    """Gradients that one step adds to a variable and another applies; replicas of unequal rows, and without
    any."""

    def train(**declared: Any) -> float:
        with strategy.scope():
            weight = keras.Variable([[0.0]])
            total = keras.Variable([[0.0]], trainable=False, **declared)
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build([weight])
        data = tf.data.Dataset.from_tensor_slices(np.arange(1, 7, dtype="float32")[:, None]).batch(5)

        def accumulate(rows: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(tf.reduce_sum(rows * weight, 1), global_batch_size=5)
            total.assign_add(tape.gradient(loss, [weight.value])[0])

        for rows in strategy.experimental_distribute_dataset(data):
            strategy.run(accumulate, args=(rows,))
        strategy.run(lambda: optimizer.apply([tf.convert_to_tensor(total)], [weight]))
        return float(np.asarray(weight)[0, 0])

    return train(), train(aggregation="mean")


CASES: list[Callable[[Any, Any], Any]] = [
    distributed_batches,
    batches_from_a_function,
    batches_of_each_replica,
    values_from_a_function,
    reduced_and_gathered,
    places,
    trained_by_hand,
    accumulated_by_hand,
]

if __name__ == "__main__":
    theirs, ours = tf.distribute.MirroredStrategy(), insitu.MirroredStrategy()
    for case in CASES:
        if len(sys.argv) < 2 or case.__name__ in sys.argv[1:]:
            both = [case(theirs, tf.distribute), case(ours, insitu)]
            print("CASE", json.dumps([case.__name__, *both]))
