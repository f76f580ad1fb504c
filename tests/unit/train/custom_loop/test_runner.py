"""Custom loops: `strategy.run` and what stands around it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import image_model, same_bits, weights

from insitu.base.errors import TrainingError

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
    assert [tuple(r["out"].shape) for r in last] == [(0, 2), (0, 2), (1, 2)]
    assert [r["loss"] is None for r in last] == [True, True, False]
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


# What can't be right


@pytest.mark.parametrize("shards", [1, 2])
def test_a_step_does_not_return_what_comes_to_be_after_it(strategy_over, shards: int):
    strategy = strategy_over(shards)
    loop = Loop(strategy)
    with strategy.scope():
        mean = keras.metrics.Mean(name="seen")
    x, y = np.zeros((4, 8, 8, 1), "float32"), np.zeros(4, "int64")

    def result(x: Any, y: Any) -> Any:
        mean.update_state(y)
        return {"rows": y, "mean": mean.result() + 1}

    def after(variable: Any) -> Any:
        def step(x: Any, y: Any) -> Any:
            loop.step(x, y)
            return variable

        return step

    with pytest.raises(TrainingError, match=r"depends on 'seen/total', which it updates\..*result\(\)"):
        strategy.run(result, (x, y))
    for variable in (loop.optimizer.iterations, loop.model.trainable_variables[0]):
        with pytest.raises(TrainingError, match=rf"a read of '{variable.path}'"):
            strategy.run(after(variable), (x, y))
    # A metric that is only called, or only read, means the same in each replica.
    strategy.run(lambda y: [mean(y + 2), y][1], (y,))
    (read, *_) = strategy.experimental_local_results(strategy.run(lambda x: mean.result(), (x,)))
    assert float(read) == float(mean.result()) == 2


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
    # All is as before, and a step that is right still trains.
    strategy.run(loop.step, (x, np.zeros(4, "int64")))
    assert loop.optimizer.iterations.numpy() == 1


def test_a_function_made_anew_is_the_same_step_while_it_uses_the_same_objects(strategy_over, monkeypatch):
    monkeypatch.setattr("insitu.train.custom_loop.runner.MAX_COMPILED_STEPS", 3)
    strategy, one = strategy_over(1), np.float32(1)
    assert [float(strategy.run(lambda x: x + 1, (one,))) for _ in range(5)] == [2] * 5

    def add(number: int) -> float:
        return float(strategy.run(lambda x: x + number, (one,)))

    assert [add(1), add(2), add(1)] == [2, 3, 2]
    # As long as some are asked for again, the one that was used longest ago makes room.
    assert [add(n) for n in (3, 4, 4, 5, 6, 1, 1)] == [4, 5, 5, 6, 7, 2, 2]
    with pytest.raises(TrainingError, match=r"4 calls in a row that differ \(number\).*the same function"):
        [add(n) for n in range(10, 20)]


def test_a_step_that_is_defined_again_trains_the_model_of_now(strategy_over):
    """As a loop over folds at the top of a script, whose names are globals."""
    script: dict[str, Any] = {"tf": tf, "strategy": strategy_over(2)}
    for _ in range(2):
        with script["strategy"].scope():
            script["weight"], script["optimizer"] = keras.Variable([[0.0]]), keras.optimizers.SGD(0.1)
        exec(STEP_OF_GLOBALS, script)
        (rows,) = script["strategy"].distribute_dataset(
            tf.data.Dataset.from_tensors(np.ones((3, 1), "float32"))
        )
        script["strategy"].run(script["step"], (rows,))
        assert float(script["weight"].numpy()[0, 0]) == pytest.approx(-0.1)


STEP_OF_GLOBALS = """
def step(rows):
    with tf.GradientTape() as tape:
        loss = strategy.compute_average_loss(tf.reduce_sum(rows * weight, 1))
    optimizer.apply(tape.gradient(loss, [weight.value]), [weight])
"""


def test_a_number_that_a_step_reads_is_that_of_now(strategy_over):
    settings = {"beta": 0.5}
    strategy = strategy_over(1)

    def step(x: Any) -> Any:
        return x * settings["beta"]

    results = []
    for beta in (0.5, 0.75, 0.5):
        settings["beta"] = beta
        results.append(float(strategy.run(step, (np.float32(2),))))
    assert results == [1.0, 1.5, 1.0]


def test_numbers_of_layers_and_optimizers_are_those_of_now(strategy_over):
    class Heated(keras.layers.Layer):
        heat = 1.0

        def call(self, x: Any) -> Any:
            return x * self.heat

    strategy, rows = strategy_over(2), np.ones((4, 2), "float32")
    with strategy.scope():
        heated, drop = Heated(), keras.layers.Dropout(1e-6, seed=1)
        model = keras.Sequential([keras.Input((2,)), heated, drop, keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(1.0)
    kernel = model.layers[-1].kernel

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = strategy.compute_average_loss(model(x, training=True)[:, 0])
        optimizer.apply(tape.gradient(loss, [kernel.value]), [kernel])

    def moved() -> list[float]:
        before = kernel.numpy()
        for (x,) in strategy.distribute_dataset(tf.data.Dataset.from_tensors((rows,))):
            strategy.run(step, (x,))
        return list((before - kernel.numpy())[:, 0])

    assert moved() == pytest.approx([1, 1])
    heated.heat = 3.0
    assert moved() == pytest.approx([3, 3])
    optimizer.clipvalue = 0.5
    assert moved() == pytest.approx([0.5, 0.5])
    drop.rate = 1 - 1e-6
    assert moved() == pytest.approx([0, 0])
    heated.heat, drop.rate, optimizer.clipvalue = 1.0, 1e-6, None
    assert moved() == pytest.approx([1, 1])


def test_a_value_of_a_layer_that_is_no_number_stays_the_same(strategy_over):
    strategy, rows = strategy_over(2), np.ones((4, 3, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3, 2)), keras.layers.Masking(float("nan"))])
    traced: list[int] = []

    def step(x: Any) -> Any:
        traced.append(1)
        return model(x)

    for calls in range(3):
        for (x,) in strategy.distribute_dataset(tf.data.Dataset.from_tensors((rows,))):
            strategy.run(step, (x,))
        if not calls:
            once = len(traced)
    assert len(traced) == once


@pytest.mark.parametrize("of_layer", [True, False])
def test_what_is_frozen_between_steps_stays(batches, strategy_over, of_layer):
    loop = Loop(strategy_over(2))
    loop.train(batches, epochs=1)
    layer = loop.model.layers[0]
    frozen = layer if of_layer else layer.kernel
    frozen.trainable = False
    before, others = layer.kernel.numpy(), loop.model.layers[-1].kernel.numpy()
    loop.train(batches, epochs=1)
    np.testing.assert_array_equal(layer.kernel.numpy(), before)
    assert not np.array_equal(loop.model.layers[-1].kernel.numpy(), others)
    frozen.trainable = True
    loop.train(batches, epochs=1)
    assert not np.array_equal(layer.kernel.numpy(), before)


def test_a_metric_may_make_its_variables_in_a_step(strategy_over):
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(15, 3)).astype("float32"), np.eye(3, dtype="float32")[np.arange(15) % 3]
    strategy = strategy_over(2)
    with strategy.scope():
        score = keras.metrics.F1Score(average="macro")
    expected = keras.metrics.F1Score(average="macro")
    for _ in range(2):
        for batch in strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
            strategy.run(lambda p, t: score.update_state(t, p), args=batch)
        expected.update_state(y, x)
    assert float(score.result()) == pytest.approx(float(expected.result()))


def test_regularization_losses_of_a_model_enter_a_step(strategy_over):
    def trained(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_regularizer="l2")])
            optimizer = keras.optimizers.SGD(0.1)

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = strategy.compute_average_loss(tf.square(model(x)))
                loss += strategy.scale_regularization_loss(tf.add_n(model.losses))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        x = np.random.default_rng(0).random((5, 3), "float32")
        for batch in strategy.distribute_dataset(tf.data.Dataset.from_tensors(x)):
            strategy.run(step, (batch,))
        return model.get_weights()

    for one, two in zip(trained(strategy_over(1)), trained(strategy_over(2)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


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


def test_text_reaches_a_step_also_in_batches_with_fewer_rows_than_replicas(strategy_over):
    texts = np.array([["ab"[index % 2]] for index in range(7)])
    target = np.arange(7, dtype=np.float32)[:, None]

    def train(strategy: Any, size: int) -> list[Any]:
        with strategy.scope():
            lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
            inputs = keras.Input((1,), dtype="string")
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            model = keras.Model(inputs, dense(lookup(inputs)))
            optimizer = keras.optimizers.SGD(0.1)

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = strategy.compute_average_loss(keras.ops.square(model(x) - y)[:, 0])
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        data = tf.data.Dataset.from_tensor_slices((texts, target)).batch(size)
        losses = [
            float(strategy.reduce("sum", strategy.run(step, args=batch)))
            for batch in strategy.distribute_dataset(data)
        ]
        return [losses, *model.get_weights()]

    for size in (1, 2, 5):
        for got, expected in zip(train(strategy_over(3), size), train(strategy_over(1), size), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)
