"""Parts of the user's own are told from those of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.replica.building import build_to_train
from insitu.train.replica.probe.probe import (
    has_custom_parts,
    has_own_numbers,
    has_own_train_step,
    is_built_to_train,
    is_of_keras,
)

LAYERS = keras.layers


def built(kind: Any = keras.Sequential, *layers: Any, **options: Any) -> keras.Model:
    model = kind([keras.Input((2,)), *layers, LAYERS.Dense(1)])
    model.compile("sgd", **{"loss": "mse", **options})
    build_to_train(model, (np.zeros((1, 2), "float32"), np.zeros((1, 1), "float32")))
    return model


class OwnLayer(LAYERS.Layer):
    def call(self, x):
        return x


class OwnLoss(keras.losses.Loss):
    def call(self, y, p):
        return keras.ops.mean(y - p, axis=-1)


class OwnMetric(keras.metrics.MeanSquaredError):
    pass


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnLossOfModel(keras.Sequential):
    def compute_loss(self, *arguments, **options):
        return super().compute_loss(*arguments, **options)


def own_function(y, p):
    return keras.ops.mean(y - p, axis=-1)


@pytest.mark.parametrize(
    "loss", [keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle(), "dice", keras.losses.tversky]
)
def test_a_loss_of_keras_over_whole_batches_is_probed(loss: Any) -> None:
    assert has_own_numbers(built(loss=loss))


def test_models_of_keras_parts_have_none() -> None:
    metrics = ["mae", keras.metrics.MeanSquaredError(), keras.metrics.AUC()]
    plain = built(keras.Sequential, LAYERS.BatchNormalization(), LAYERS.Dropout(0.1), metrics=metrics)
    assert not has_custom_parts(plain)
    assert not has_own_train_step(plain)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"loss": OwnLoss()}, True),
        ({"loss": own_function}, True),
        ({"metrics": [own_function]}, True),
        ({"metrics": [OwnMetric()]}, True),
        ({"metrics": [keras.metrics.MeanMetricWrapper(own_function)]}, True),
    ],
    ids=["loss", "loss function", "metric function", "metric", "wrapped function"],
)
def test_losses_and_metrics(options: Any, numbers: bool) -> None:
    model = built(**options)
    assert has_custom_parts(model)
    assert has_own_numbers(model) is numbers


def test_layers_and_methods() -> None:
    layered = built(keras.Sequential, OwnLayer())
    assert has_custom_parts(layered)
    assert not has_own_numbers(layered)
    for kind in (OwnStep, OwnLossOfModel):
        assert has_own_numbers(built(kind))
    assert has_own_train_step(built(OwnStep))
    assert not has_own_train_step(built(OwnLossOfModel))
    assert is_of_keras(None)


def test_a_model_that_has_seen_no_labels_is_not_built() -> None:
    model = keras.Sequential([keras.Input((2,)), LAYERS.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    assert not is_built_to_train(model)
    assert is_built_to_train(built(metrics=["mae"]))
