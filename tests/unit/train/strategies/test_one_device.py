"""One replica, fused into one call a step: the bits of plain Keras, whatever the model or the data."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import image_model, same_bits, weights

import insitu
from insitu.base.context import context
from insitu.base.errors import InputError, TrainingError


def rows(count: int = 70) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 8, 8, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0).astype("int64")


def trained(scope: Any, **fit_options: Any) -> tuple[Any, dict[str, Any], Any]:
    keras.utils.set_random_seed(3)
    x, y = rows()
    if scope is None:
        model = image_model()
    else:
        with scope:
            model = image_model()
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **fit_options}
    history = model.fit(x, y, validation_data=(x[:21], y[:21]), **options).history
    return model, history, model.evaluate(x, y, verbose=0)


def test_the_bits_and_logs_are_those_of_plain_keras():
    weight = np.linspace(0, 1, 70).astype("float32")
    plain, plain_history, plain_evaluation = trained(None, sample_weight=weight)
    model, history, evaluation = trained(insitu.OneDeviceStrategy("cpu:0").scope(), sample_weight=weight)
    assert same_bits(weights(model), weights(plain))
    assert same_bits(
        [v.numpy() for v in model.optimizer.variables], [v.numpy() for v in plain.optimizer.variables]
    )
    for name, values in plain_history.items():
        # Keras counts the loss of each batch by rows in training, and of each batch as one in evaluation.
        tolerance = 1e-6 if name in ("loss", "accuracy", "top") else 0.2
        np.testing.assert_allclose(history[name], values, rtol=tolerance)
    np.testing.assert_allclose(evaluation[1:], plain_evaluation[1:], rtol=1e-6)
    x, _ = rows()
    np.testing.assert_array_equal(model.predict(x[:7], verbose=0), plain.predict(x[:7], verbose=0))


def test_one_device_with_two_shards_is_two_workers_of_one_shard():
    here = dataclasses.replace(context(), shards=(0, 1), num_shards=2)
    mine, history, _ = trained(insitu.OneDeviceStrategy("cpu:0", context=here).scope())
    theirs, other, _ = trained(insitu.MultiWorkerMirroredStrategy(context=here).scope())
    assert same_bits(weights(mine), weights(theirs))
    assert history == other


def test_variables_of_a_model_that_is_built_in_fit_lie_on_the_device():
    with insitu.OneDeviceStrategy("/device:CPU:0").scope():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4), "float32"), np.ones((8, 2), "float32"), verbose=0)
    assert all(variable.value.device.endswith("CPU:0") for variable in model.variables)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_model_with_two_optimizers_trains_as_written(run_eagerly: bool):
    """Nothing is combined, so nothing of a train_step has to be understood."""
    import tensorflow as tf

    class Two(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for optimizer, layer in zip((self.optimizer, self.second), self.layers[1:], strict=True):
                variables = layer.trainable_variables
                optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    def run(scope: Any) -> Any:
        with scope:
            inputs = keras.Input((3,))
            hidden = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
            model = Two(inputs, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
            model.second = keras.optimizers.SGD(0.01)
            model.second.build(model.layers[2].trainable_variables)
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
            model.optimizer.build(model.layers[1].trainable_variables)
        model.fit(np.ones((8, 3), "float32"), np.zeros((8, 1), "float32"), verbose=0, batch_size=4)
        return weights(model)

    assert same_bits(run(insitu.OneDeviceStrategy().scope()), run(contextlib.nullcontext()))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_prediction_before_any_fit_changes_nothing(num_shards: int):
    here = dataclasses.replace(context(), shards=tuple(range(num_shards)), num_shards=num_shards)
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")

    def run(predict: bool) -> Any:
        with insitu.OneDeviceStrategy(context=here).scope():
            model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
            model.compile("adam", "mse", metrics=["mae"])
        if predict:
            np.testing.assert_allclose(model.predict(x, verbose=0)[:, 1], x.sum(1), atol=1e-5)
        history = model.fit(x, x[:, :2], batch_size=4, shuffle=False, verbose=0).history
        return weights(model), history

    (mine, logs), (theirs, other) = run(True), run(False)
    assert same_bits(mine, theirs)
    assert logs == other


def test_a_failure_in_the_middle_is_gone_on_from(tmp_path: Path):
    class Stop(Exception):
        pass

    class StopAt(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen += 1
            if self.seen == 8:
                raise Stop

    whole, _, _ = trained(insitu.OneDeviceStrategy().scope())
    with pytest.raises(Stop):
        trained(
            insitu.OneDeviceStrategy().scope(),
            callbacks=[insitu.BackupAndRestore(str(tmp_path), save_freq=3), StopAt()],
        )
    model, _, _ = trained(
        insitu.OneDeviceStrategy().scope(), callbacks=[insitu.BackupAndRestore(str(tmp_path), save_freq=3)]
    )
    assert same_bits(weights(model), weights(whole))


def test_what_cannot_be_one_device_is_named():
    with pytest.raises(InputError, match=r"one of cpu:0 on tensorflow.*Received: gpu:3"):
        insitu.OneDeviceStrategy("cuda:3")
    here = dataclasses.replace(context(), workers=("127.0.0.1:1", "127.0.0.1:2"))
    with pytest.raises(TrainingError, match="a job with 2 workers"):
        insitu.OneDeviceStrategy(context=here)
