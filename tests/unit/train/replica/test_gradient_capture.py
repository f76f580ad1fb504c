"""Gradients are captured instead of applied."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import TrainingError
from insitu.train.replica.gradient_capture import capture_gradients


def test_a_call_of_apply_is_recorded_and_changes_nothing() -> None:
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    with capture_gradients(optimizer) as captured:
        optimizer.apply_gradients([(np.ones(2, "float32"), variable)])
    assert variable.numpy().tolist() == [1, 1]
    assert captured.variables == [variable] and captured.gradients[0].tolist() == [1, 1]
    optimizer.apply([np.ones(2, "float32")], [variable])
    assert variable.numpy().tolist() == [0, 0]


@pytest.mark.parametrize("calls", [0, 2])
def test_a_step_applies_exactly_once(calls: int) -> None:
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    with pytest.raises(TrainingError, match=f"Received: {calls} calls"), capture_gradients(optimizer):
        for _ in range(calls):
            optimizer.apply([np.ones(2, "float32")], [variable])


def test_a_step_with_nothing_to_train_need_not_apply_anything() -> None:
    with capture_gradients(keras.optimizers.SGD(1.0), trains=False) as captured:
        pass
    assert captured.calls == 0


@pytest.mark.parametrize("kind", ["plain", "of its own class", "scaled"])
def test_another_optimizer_is_refused_wherever_it_is_kept(kind: str) -> None:
    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    variable = keras.Variable(np.ones(2, "float32"))
    makers = {"plain": keras.optimizers.Adam, "of its own class": Own}
    other = makers.get(kind, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))()
    other.build([variable])
    hidden = {"other": other}
    with (
        pytest.raises(TrainingError, match=rf"applies another one, '{other.name}'.*custom loop"),
        capture_gradients(keras.optimizers.SGD(1.0)),
    ):
        hidden["other"].apply_gradients([(np.ones(2, "float32"), variable)])
    assert variable.numpy().tolist() == [1, 1]
    other.apply_gradients([(np.ones(2, "float32"), variable)])
    assert variable.numpy().tolist() != [1, 1]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_scaled_loss_is_smaller_by_the_exponent_and_its_gradient_is_not(kind: str) -> None:
    """Or else gradients of float16 overflow that do not on one device."""
    makers = {
        "dynamic": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0),
        "static": lambda: keras.optimizers.SGD(loss_scale_factor=8.0),
    }
    variable, optimizer = keras.Variable(np.ones(2, "float32")), makers[kind]()
    optimizer.build([variable])
    with capture_gradients(optimizer, loss_exponent=2) as captured:
        assert float(optimizer.scale_loss(np.float32(3))) == 6
        optimizer.apply([np.array([6.0, 60_000.0], "float16")], [variable])
    gradient = keras.ops.convert_to_numpy(captured.gradients[0])
    assert gradient.tolist() == [24, 240_000] and gradient.dtype == np.float32
    assert float(optimizer.scale_loss(np.float32(3))) == 24


def test_the_gradient_of_a_few_rows_is_scaled_back_too() -> None:
    table = keras.Variable(np.zeros((3, 2), "float32"))
    optimizer = keras.optimizers.SGD(loss_scale_factor=8.0)
    optimizer.build([table])
    with capture_gradients(optimizer, loss_exponent=2) as captured:
        optimizer.scale_loss(np.float32(3))
        rows = tf.IndexedSlices(tf.ones((2, 2), "float16"), tf.constant([2, 2]), tf.constant([3, 2]))
        optimizer.apply([rows], [table])
    gradient = tf.convert_to_tensor(captured.gradients[0])
    assert gradient.numpy().tolist() == [[0, 0], [0, 0], [8, 8]] and gradient.dtype == tf.float32


def test_a_loss_that_is_not_scaled_stays() -> None:
    variable, optimizer = keras.Variable(np.ones(2, "float32")), keras.optimizers.SGD()
    optimizer.build([variable])
    with capture_gradients(optimizer, loss_exponent=2) as captured:
        assert optimizer.scale_loss(np.float32(3)) == 3
        optimizer.apply([np.ones(2, "float32")], [variable])
    assert captured.gradients[0].tolist() == [1, 1]
