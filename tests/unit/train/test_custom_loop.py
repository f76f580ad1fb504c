"""Custom loops: `strategy.run` and what stands around it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import image_model, in_shards, same_bits, weights

from insitu.errors import Diverged, InputError, TrainingError
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.custom_loop.per_replica import PerReplica
from insitu.train.custom_loop.reduction import _pack, _unpack
from insitu.train.custom_loop.replica_check import check_weights

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


class Loop:
    """A model, and a step of its own that trains it, under a strategy."""

    def __init__(self, strategy: Any, optimizer: Any = None, **model: Any) -> None:
        keras.utils.set_random_seed(7)
        self.strategy = strategy
        with strategy.scope():
            self.model = image_model(**model)
            self.optimizer = (optimizer or (lambda: keras.optimizers.Adam(1e-2)))()
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            out = self.model(x, training=True)
            loss = self.strategy.compute_average_loss(LOSS(y, out))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.accuracy.update_state(y, out)
        return {"loss": loss, "out": out}

    def test(self, x: Any, y: Any) -> Any:
        out = self.model(x, training=False)
        self.accuracy.update_state(y, out)
        return out

    def train(self, data: Any, epochs: int = 2) -> list[float]:
        distributed = self.strategy.distribute_dataset(data)
        losses = []
        for _ in range(epochs):
            for x, y in distributed:
                result = self.strategy.run(self.step, args=(x, y))
                losses.append(float(self.strategy.reduce("sum", result["loss"])))
        return losses


@pytest.fixture
def batches(rows):
    """Four global batches; the last has 11 rows."""
    return tf.data.Dataset.from_tensor_slices(rows).batch(64)


def test_one_replica_gives_the_bits_of_fit(rows, batches, strategy_over):
    plain = image_model()
    plain.fit(*rows, batch_size=64, epochs=2, shuffle=False, verbose=0)
    loop = Loop(strategy_over(1))
    loop.train(batches)
    assert same_bits(weights(plain), weights(loop.model))
    assert loop.accuracy.result() > 0.5


@pytest.mark.parametrize("num_shards", [2, 3])
def test_replicas_agree_with_fit_over_as_many_shards(rows, batches, strategy_over, num_shards):
    strategy = strategy_over(num_shards)
    with strategy.scope():
        fitted = image_model()
    history = fitted.fit(*rows, batch_size=64, epochs=2, shuffle=False, verbose=0).history
    loop = Loop(strategy_over(num_shards))
    losses = loop.train(batches)
    np.testing.assert_allclose(
        np.average(losses[:4], weights=[64, 64, 64, 11]), history["loss"][0], rtol=1e-5
    )
    for mine, theirs in zip(weights(loop.model), weights(fitted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_are_summed_so_a_loss_divided_by_hand_is_right_too(rows, strategy_over):
    def train(num_shards: int) -> list[np.ndarray]:
        loop = Loop(strategy_over(num_shards), batch_norm=False, dropout=0.0)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(LOSS(y, loop.model(x, training=True))) / 64
            variables = loop.model.trainable_variables
            loop.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        data = tf.data.Dataset.from_tensor_slices(rows).batch(64)
        for batch in loop.strategy.experimental_distribute_dataset(data):
            loop.strategy.run(step, args=batch)
        return weights(loop.model)

    for one, three in zip(train(1), train(3), strict=True):
        np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-6)


def test_a_replica_without_rows_takes_part_with_nothing(strategy_over):
    loop = Loop(strategy_over(3))
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros(8, "int64"))).batch(7)
    results = [loop.strategy.run(loop.step, args=batch) for batch in loop.strategy.distribute_dataset(data)]
    last = loop.strategy.local_results(results[1])
    assert [r["out"] is None for r in last] == [True, True, False]
    assert loop.strategy.reduce("sum", results[1]["loss"]).shape == ()
    assert loop.strategy.gather(results[1]["out"]).shape == (1, 2)
    assert loop.accuracy.count.numpy() == 8
    assert loop.optimizer.iterations.numpy() == 2


def test_a_step_that_trains_nothing_adds_up_metrics_and_one_that_moves_nothing_is_no_collective(
    batches, strategy_over, monkeypatch
):
    loop = Loop(strategy_over(2))
    before = weights(loop.model)
    for batch in loop.strategy.distribute_dataset(batches):
        loop.strategy.run(loop.test, args=batch)
    assert loop.accuracy.count.numpy() == 203
    assert same_bits(before, weights(loop.model))
    group = loop.strategy.membership.group()
    x = next(iter(batches))[0]
    loop.strategy.run(loop.model, args=(x,))
    monkeypatch.setattr(group, "all_gather", lambda array: pytest.fail("a collective"))
    out = loop.strategy.run(loop.model, args=(x,))
    assert [o.shape for o in out.values] == [(64, 2), (64, 2)]


def test_two_optimizers_in_one_step(rows, batches, strategy_over):
    def train(num_shards: int) -> Any:
        strategy = strategy_over(num_shards)
        loop = Loop(strategy, batch_norm=False, dropout=0.0)
        with strategy.scope():
            other = keras.optimizers.SGD(0.1, momentum=0.9)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = strategy.compute_average_loss(LOSS(y, loop.model(x, training=True)))
            variables = loop.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            loop.optimizer.apply(gradients[:2], variables[:2])
            other.apply(gradients[2:], variables[2:])

        for batch in strategy.distribute_dataset(batches):
            strategy.run(step, args=batch)
        return weights(loop.model)

    for one, two in zip(train(1), train(2), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_loss_scaling_accumulation_and_clipping_see_the_sum(batches, strategy_over):
    def make() -> Any:
        inner = keras.optimizers.Adam(1e-2, global_clipnorm=0.1, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    def train(num_shards: int) -> Any:
        loop = Loop(strategy_over(num_shards), make, batch_norm=False, dropout=0.0)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loop.strategy.compute_average_loss(LOSS(y, loop.model(x, training=True)))
                loss = loop.optimizer.scale_loss(loss)
            variables = loop.model.trainable_variables
            loop.optimizer.apply(tape.gradient(loss, variables), variables)

        for batch in loop.strategy.distribute_dataset(batches):
            loop.strategy.run(step, args=batch)
        return weights(loop.model)

    for one, two in zip(train(1), train(2), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_arguments_that_are_no_batches(strategy_over):
    strategy = strategy_over(2)
    assert strategy.run(lambda a, b: a + b, (1, 2)).values == (3, 3)
    result = strategy.run(
        lambda x, scale, name: {name: x * scale}, (np.ones(3, "float32"), 2.0), {"name": "a"}
    )
    np.testing.assert_array_equal(result["a"].values[1], [2, 2, 2])
    calls = []

    def step(x: Any, rate: Any) -> Any:
        calls.append(None)
        return x * rate

    for rate in (0.5, 0.25):
        assert strategy.run(step, (np.float32(4), rate)).values[0].numpy() == 4 * rate
    assert len(calls) == 2, "learnt once, compiled once"


def test_average_loss_weighs_rows_and_a_regularization_loss_counts_once(strategy_over):
    strategy = strategy_over(2)
    data = tf.data.Dataset.from_tensor_slices(np.arange(5, dtype="float32")).batch(5)

    def step(x: Any) -> Any:
        return (
            strategy.compute_average_loss(x, sample_weight=x * 0 + 2),
            strategy.compute_average_loss(x, global_batch_size=10),
            strategy.scale_regularization_loss(3.0),
        )

    for x in strategy.distribute_dataset(data):
        result = strategy.reduce("sum", strategy.run(step, (x,)))
    assert result == (4.0, 1.0, 3.0)
    assert strategy.compute_average_loss(np.ones(4, "float32"), global_batch_size=8) == 0.5
    assert strategy_over(1).compute_average_loss(np.ones(4, "float32")) == 1
    with pytest.raises(TrainingError, match=r"Outside strategy\.run"):
        strategy.compute_average_loss(np.ones(4, "float32"))
    with pytest.raises(TrainingError, match="reduction='none'"):
        strategy.compute_average_loss(np.float32(1), global_batch_size=8)
    with pytest.raises(TrainingError, match="at least 1"):
        strategy.compute_average_loss(np.ones(4, "float32"), global_batch_size=0)


def test_reduce_and_gather(strategy_over):
    strategy = strategy_over(1)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.run(lambda a, b: a + b, (1, 2)) == 3
    assert strategy.reduce("sum", np.float32(3)) == 3
    np.testing.assert_array_equal(
        strategy.reduce("mean", np.array([[1, 2], [3, 6]]), axis=0), np.array([2.0, 4.0])
    )
    gathered = strategy.gather({"a": np.arange(6).reshape(2, 3)}, axis=1)
    np.testing.assert_array_equal(gathered["a"], np.arange(6).reshape(2, 3))
    uneven = PerReplica((np.array([1, 2, 3]), None, np.array([8])))
    three = strategy_over(3)
    assert three.reduce("mean", uneven, axis=0) == 3.5
    assert three.reduce("sum", PerReplica((1, None, 2))) == 3
    assert three.gather(uneven).tolist() == [1, 2, 3, 8]
    for wrong, message in [
        (lambda: strategy.reduce("max", 1), "'sum' or 'mean'"),
        (lambda: three.reduce("sum", PerReplica((None,) * 3)), "Received: none"),
        (lambda: three.reduce("sum", uneven), "the same shape"),
        (lambda: three.reduce("sum", []), "empty"),
        (lambda: three.gather(PerReplica((1, 2, 3))), "scalars"),
        (lambda: strategy.reduce("sum", uneven), "which has 1 here"),
    ]:
        with pytest.raises(TrainingError, match=message):
            wrong()


def test_values_survive_the_way_to_other_tasks():
    row = [np.arange(6, dtype="float64").reshape(2, 3), None, np.array(True), np.zeros((0, 4), "int8")]
    for sent, received in zip(row, _unpack(_pack(row)), strict=True):
        if sent is None:
            assert received is None
        else:
            np.testing.assert_array_equal(sent, received)
            assert received.dtype == sent.dtype


def test_a_custom_loop_iterates_this_replicas_part(strategy_over):
    data = tf.data.Dataset.range(10).batch(4)
    mine = strategy_over(1).distribute_dataset(data)
    assert len(mine) == 3
    for _epoch in range(2):
        assert [part.tolist() for part in mine] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    second = MultiWorkerMirroredStrategy(context=in_shards((0,), 2))
    parts = iter(second.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4))._feed.steps(0, 0))
    # The last global batch has one row, and the first replica's slice of it is empty.
    assert [part.parts[0].rows for part in parts] == [2, 2, 0]
    both = strategy_over(2).distribute_dataset(data.filter(lambda x: True))
    assert [[v.tolist() for v in part.values] for part in both] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8], [9]],
    ]
    with pytest.raises(InputError, match="known size"):
        len(both)


# What can't be right


def test_what_a_step_may_not_do(strategy_over):
    strategy = strategy_over(2)
    loop = Loop(strategy)
    x = np.zeros((4, 8, 8, 1), "float32")
    variables = loop.model.trainable_variables
    outside = keras.optimizers.SGD()

    def makes(x: Any) -> Any:
        return keras.layers.Dense(3)(x)

    def twice(x: Any) -> None:
        for _ in range(2):
            loop.optimizer.apply([v * 0 for v in variables], variables)

    def reads_after(x: Any) -> Any:
        loop.optimizer.apply([v * 0 for v in variables], variables)
        return loop.model(x)

    def applies_outside(x: Any) -> None:
        outside.apply([v * 0 for v in variables], variables)

    def of_tensors(x: Any) -> None:
        loop.optimizer.apply([x], [tf.constant(1.0)])

    for step, message in [
        (makes, r"can't make variables.*build"),
        (twice, "once"),
        (reads_after, r"can't\s+read them after"),
        (applies_outside, r"made in strategy\.scope\(\)"),
        (of_tensors, "Keras variables"),
        (tf.function(makes), "can't make variables"),
    ]:
        with pytest.raises(TrainingError, match=message):
            strategy.run(step, (x,))
    with pytest.raises(TrainingError, match=r"inside a tf\.function"):
        tf.function(lambda: strategy.run(loop.model, (x,)), autograph=False)()
    # All is as before, and a step that is right still trains.
    strategy.run(loop.step, (x, np.zeros(4, "int64")))
    assert loop.optimizer.iterations.numpy() == 1


def test_a_new_function_for_each_step_is_noticed(strategy_over, monkeypatch):
    monkeypatch.setattr("insitu.train.custom_loop.runner.MANY_PROGRAMS", 3)
    strategy = strategy_over(1)
    for _ in range(3):
        strategy.run(lambda x: x + 1, (np.float32(1),))
    with pytest.raises(TrainingError, match="the same function each time"):
        strategy.run(lambda x: x + 1, (np.float32(1),))


class TwoReplicas:
    """A group of two whose other member has other weights."""

    size = 2

    def __init__(self, other: float) -> None:
        self._other = other
        self.told: list[np.ndarray] = []

    def task(self, rank: int) -> str:
        return f"worker:{rank}"

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """The other has as many variables, and other checksums."""
        if root:
            array[-1] += np.int64(self._other)
        return array


def test_replicas_that_drift_apart_are_named():
    variables = [keras.Variable(np.ones(3, "float32"), name="kernel")]
    check_weights(TwoReplicas(0), variables, "after step 3")  # type: ignore[arg-type]
    with pytest.raises(Diverged, match=r"after step 3: worker:1 from worker:0.*forget to combine"):
        check_weights(TwoReplicas(1), variables, "after step 3")  # type: ignore[arg-type]


def test_a_model_compiled_outside_is_not_trained_in_a_scope(rows, strategy_over):
    plain, strategy = image_model(), strategy_over(1)
    with strategy.scope(), pytest.raises(TrainingError, match=r"'sequential.*', compiled outside"):
        plain.fit(*rows, verbose=0)
    assert plain.optimizer.iterations == 0
    with strategy.scope():
        mine = image_model()
        mine.fit(*rows, batch_size=128, verbose=0)
    for model in (plain, mine):  # after the scope it is Keras' business again
        model.fit(*rows, batch_size=128, verbose=0)


def test_a_model_of_another_strategy_is_refused_in_each_way(rows, strategy_over):
    first, second = strategy_over(1), strategy_over(1)
    with first.scope():
        model = image_model()
    x, y = rows
    said = r"'.+in another strategy's scope"
    with second.scope():
        with pytest.raises(TrainingError, match=said):
            model.fit(x, y, verbose=0)
        with pytest.raises(TrainingError, match=said):
            model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match=said):
        second.run(lambda x: model(x), (x[:4],))
    assert first.run(lambda x: model(x), (x[:4],)).shape == (4, 2)
