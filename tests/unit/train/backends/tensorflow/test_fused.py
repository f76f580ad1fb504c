"""A sparse gradient reaches the optimizer with each row once."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from models import in_shards, weights

from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy
from insitu.train.backends.tensorflow.replica import _add_up, _make_dense

X = np.random.default_rng(0).integers(0, 6, (37, 3))
Y = np.random.default_rng(1).normal(size=(37, 1)).astype("float32")


def train(scope: Any, optimizer: str = "adam", **options: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    with scope:
        stack = [keras.Input((3,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(1)]
        model = keras.Sequential(stack)
        model.compile(keras.optimizers.get({"class_name": optimizer, "config": options}), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return weights(model)


def over(shards: int) -> Any:
    context = in_shards(tuple(range(shards)), shards)
    return MultiWorkerMirroredStrategy(context=context).scope()


class Densifying(contextlib.AbstractContextManager[None]):
    """Gives dense gradients to optimizers, as JAX and PyTorch do."""

    def __enter__(self) -> None:
        original = self.original = BaseOptimizer.apply

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            return original(optimizer, [tf.convert_to_tensor(g) for g in grads], trainable_variables)

        BaseOptimizer.apply = apply

    def __exit__(self, *error: object) -> None:
        BaseOptimizer.apply = self.original


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("adam", {"learning_rate": 0.01}), ("sgd", {"learning_rate": 0.1, "clipnorm": 0.01}), ("adagrad", {})],
)
def test_one_shard_trains_as_two_and_as_dense_gradients(optimizer: str, options: dict[str, float]) -> None:
    with Densifying():
        dense = train(contextlib.nullcontext(), optimizer, **options)
    for scope in (over(1), over(2), OneDeviceStrategy("cpu:0").scope()):
        for mine, theirs in zip(train(scope, optimizer, **options), dense, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_rows_are_added_up() -> None:
    values, rows = tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 0, 3])
    gradient = tf.IndexedSlices(values, rows, tf.constant([4, 1]))
    summed = _add_up(gradient)
    found = zip(summed.indices.numpy().tolist(), summed.values.numpy()[:, 0], strict=True)
    assert dict(found) == {3: 5, 0: 2}
    assert _make_dense(gradient).numpy()[:, 0].tolist() == [2, 0, 0, 5]
