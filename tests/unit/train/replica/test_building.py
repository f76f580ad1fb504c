"""A model that can't be built by symbolic inputs says what helps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError


class WithoutCall(keras.Model):
    """Trains by its own step alone."""

    def __init__(self, built: bool) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(1)
        self.inner.build((None, 3))
        if built:
            self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, self.inner(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"loss": keras.losses.MeanSquaredError()(y, self.inner(x))}


def test_a_model_without_call_is_told_to_say_that_it_is_built(strategy_over):
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with strategy_over(2).scope():
        unbuilt, built = WithoutCall(False), WithoutCall(True)
        for model in (unbuilt, built):
            model.compile("sgd")
    with pytest.raises(RuntimeError, match=r"(?s)automatically build.*`self.built = True`"):
        unbuilt.fit(x, y, batch_size=4, verbose=0)
    built.fit(x, y, batch_size=4, verbose=0)


def test_a_second_optimizer_is_refused_before_the_model_is_built(strategy_over):
    with strategy_over(2).scope():
        model = WithoutCall(False)
        model.compile("sgd")
        model.other_optimizer = keras.optimizers.SGD()
    with pytest.raises(TrainingError, match=r"attributes other_optimizer\. .*strategy\.run"):
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
