"""A coordinator's functions run once each, and give what a plain loop gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import in_shards, same_bits

from insitu.base.errors import InputError, TrainingError
from insitu.train import ParameterServerStrategy
from insitu.train.parameter_server.coordinator import (
    ClusterCoordinator,
    RemoteValue,
    experimental_get_current_worker_index,
)

ROWS = np.linspace(-1, 1, 64, dtype="float32").reshape(32, 2)
LABELS = (ROWS @ np.array([[2.0], [-1.0]], "float32"))[:, 0]


def over(num_shards: int = 1, **options: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(context=in_shards(tuple(range(num_shards)), num_shards), **options)


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).batch(8).repeat()


class Loop:
    """A model in a strategy's scope, and a step of it as a coordinator's scripts have it."""

    def __init__(self) -> None:
        self.strategy = over()
        with self.strategy.scope():
            layers = [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
            self.model = keras.Sequential(layers)
            self.optimizer = keras.optimizers.Adam(0.1)
            self.seen = keras.metrics.Sum()
        self.coordinator = ClusterCoordinator(self.strategy)

        def replica_step(rows: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = (self.model(rows, training=True)[:, 0] - labels) ** 2
                loss = tf.nn.compute_average_loss(losses)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            self.seen.update_state(tf.ones_like(labels))
            return loss

        @tf.function
        def step(iterator: Any) -> Any:
            rows, labels = next(iterator)
            losses = self.strategy.run(replica_step, args=(rows, labels))
            return self.strategy.reduce("SUM", losses, axis=None)

        self.step = step


def plain_loop(steps: int) -> tuple[list[float], Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer, losses = keras.optimizers.Adam(0.1), []
    for rows, labels in batches().take(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows, training=True)[:, 0] - labels) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        losses.append(float(loss))
    return losses, model


def test_one_worker_has_the_numbers_of_a_plain_loop() -> None:
    loop = Loop()
    iterator = iter(loop.coordinator.create_per_worker_dataset(batches))
    results = []
    for _ in range(2):
        results += [loop.coordinator.schedule(loop.step, args=(iterator,)) for _ in range(5)]
        loop.coordinator.join()
    losses, reference = plain_loop(10)
    np.testing.assert_allclose([value.fetch() for value in results], losses, rtol=1e-3)
    for own, expected in zip(loop.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
    assert float(loop.seen.result()) == 80
    assert loop.strategy._open_session()._client.stats()[0]["applied"] == 10
    assert loop.strategy.num_replicas_in_sync == 1


def test_each_worker_makes_its_own_data() -> None:
    strategy = over()
    coordinator = ClusterCoordinator(strategy)

    def make(given: Any) -> tf.data.Dataset:
        assert (given.num_input_pipelines, given.input_pipeline_id, given.num_replicas_in_sync) == (1, 0, 1)
        return tf.data.Dataset.range(8).batch(given.get_per_replica_batch_size(4))

    @tf.function
    def make_worker_dataset() -> Any:
        return strategy.distribute_datasets_from_function(make)

    again = strategy.experimental_distribute_dataset(strategy.distribute_datasets_from_function(make))
    for made in (make_worker_dataset, again):
        iterator = iter(coordinator.create_per_worker_dataset(made))
        assert coordinator.schedule(next, args=(iterator,)).fetch().tolist() == [0, 1, 2, 3]


def test_metrics_count_from_where_a_script_has_reset_them() -> None:
    loop = Loop()
    iterator = iter(loop.coordinator.create_per_worker_dataset(batches()))
    loop.coordinator.schedule(loop.step, args=(iterator,))
    assert loop.coordinator.done()
    assert float(loop.seen.result()) == 8
    loop.seen.reset_state()
    first = loop.coordinator.schedule(loop.step, args=(iterator,))
    loop.coordinator.fetch(first)
    assert float(loop.seen.result()) == 0  # counted at the join
    loop.coordinator.schedule(loop.step, args=(iterator,))
    loop.coordinator.join()
    assert float(loop.seen.result()) == 16
    loop.optimizer.learning_rate = 0.0
    before = loop.model.get_weights()
    loop.coordinator.schedule(loop.step, args=(iterator,))
    loop.coordinator.join()
    assert same_bits(loop.model.get_weights(), before)


def test_any_structure_comes_back_and_other_things_are_refused() -> None:
    coordinator = ClusterCoordinator(over())
    value = coordinator.schedule(lambda x, y=1: {"a": [x, None], "b": tf.constant([y])}, (2,), {"y": 3})
    fetched = coordinator.fetch([value, "as it is"])
    assert fetched[0]["a"] == [2, None] and fetched[0]["b"].tolist() == [3] and fetched[1] == "as it is"
    assert tf.is_tensor(value.get()["b"])
    coordinator.schedule(object)
    with pytest.raises(TrainingError, match=r"Received: object from builtins\.object"):
        coordinator.join()
    with pytest.raises(InputError, match="a RemoteValue as an argument"):
        coordinator.schedule(len, args=(value,))
    with pytest.raises(InputError, match="Received: 3"):
        coordinator.schedule(3)  # type: ignore[arg-type]


def test_a_failure_is_raised_where_results_are_waited_for_and_the_rest_has_run() -> None:
    coordinator, ran = ClusterCoordinator(over()), []

    def fail() -> None:
        raise ValueError("no such thing")

    bad = coordinator.schedule(fail)
    good = coordinator.schedule(lambda: ran.append(1))
    assert isinstance(good, RemoteValue) and good.fetch() is None
    with pytest.raises(ValueError, match=r"^no such thing$"):
        bad.fetch()
    with pytest.raises(ValueError, match=r"^no such thing$"):
        coordinator.join()
    coordinator.join()
    with pytest.raises(ValueError, match=r"no such thing \(in function 0, on worker:0\)"):
        bad.fetch()
    assert ran == [1]


def test_the_end_of_data_is_tensorflows_error() -> None:
    loop = Loop()
    iterator = iter(loop.coordinator.create_per_worker_dataset(lambda: batches().take(1)))
    for _ in range(2):
        loop.coordinator.schedule(loop.step, args=(iterator,))
    with pytest.raises(tf.errors.OutOfRangeError):
        loop.coordinator.join()
    assert float(loop.seen.result()) == 8


def test_the_worker_of_a_function_is_known_in_it_alone() -> None:
    coordinator = ClusterCoordinator(over())
    assert coordinator.schedule(experimental_get_current_worker_index).fetch() == 0
    with pytest.raises(TrainingError, match="a call outside of one"):
        experimental_get_current_worker_index()


def test_what_a_coordinator_cannot_hand_out_is_refused() -> None:
    strategy = over()
    coordinator = ClusterCoordinator(strategy)
    with pytest.raises(TrainingError, match=r"next\(\) of the iterators of all workers"):
        next(iter(coordinator.create_per_worker_dataset([1, 2])))
    assert ClusterCoordinator(strategy) is coordinator and coordinator.strategy is strategy
    with pytest.raises(TrainingError, match=r"strategy\.run outside of a scheduled function"):
        strategy.run(lambda: None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match="Received: fit"):
        model.fit(ROWS, LABELS, verbose=0)
    with pytest.raises(TrainingError, match="mode='sync', in which servers wait"):
        ClusterCoordinator(over(mode="sync"))
    with pytest.raises(TrainingError, match="a worker with 2 shards"):
        ClusterCoordinator(over(2))
    read = ParameterServerStrategy(context=in_shards((0,), 2))
    assert read.num_replicas_in_sync == 2
    with pytest.raises(TrainingError, match="a script that has read 2 before"):
        ClusterCoordinator(read)
    with pytest.raises(InputError, match="Received: SimpleNamespace"):
        ClusterCoordinator(SimpleNamespace())


def test_metrics_may_be_counted_outside_of_a_step() -> None:
    loop = Loop()
    loop.coordinator.schedule(lambda: loop.seen.update_state([1.0, 2.0]))
    loop.coordinator.join()
    assert float(loop.seen.result()) == 3.0
