"""A scope tracks what is created in it, without keeping it alive."""

from __future__ import annotations

import gc

import keras
import pytest

from insitu.base.errors import TrainingError
from insitu.train.custom_loop.scope import CreationTracker


def test_optimizers_layers_and_weights_are_tracked_while_it_is_open() -> None:
    tracker, compiled, fitted = CreationTracker(), [], []
    with tracker.track(compiled.append, fitted.append):
        layer, optimizer = keras.layers.Dense(1), keras.optimizers.SGD()
        layer.build((None, 2))
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile("sgd", "mse")
    outside = keras.optimizers.SGD()
    assert any(made is optimizer for made in tracker.optimizers)
    assert not any(made is outside for made in tracker.optimizers)
    assert any(made is layer for made in tracker.layers)
    assert [v.path for v in tracker.weights()] == [v.path for v in layer.trainable_variables]
    assert compiled == [model] and not fitted
    count = len(tracker.optimizers)
    del optimizer
    gc.collect()
    assert len(tracker.optimizers) == count - 1


def test_a_variable_of_another_scope_is_refused() -> None:
    first, second = CreationTracker(), CreationTracker()
    with first.track(lambda model: None, lambda model: None):
        variable = keras.Variable(1.0, name="w")
    first.check_created_here([variable])
    with pytest.raises(TrainingError, match="in another strategy's scope"):
        second.check_created_here([variable])
