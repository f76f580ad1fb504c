"""What workers send to servers about a model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.parameter_server import model_spec
from insitu.train.parameter_server.keras_optimizer import serialize_optimizer
from insitu.train.parameter_server.model_spec import ClipNorms


def test_norms_are_clipped_as_keras_does() -> None:
    gradients = [np.array([3.0, 4.0], "float32"), np.array([[12.0]], "float32")]
    together = [g.copy() for g in gradients]
    ClipNorms(each=5.0).clip(gradients)
    assert gradients[0].tolist() == [3, 4] and gradients[1].tolist() == [[5]]
    ClipNorms(together=6.5).clip(together)
    assert together[0].tolist() == [1.5, 2] and together[1].tolist() == [[6]]
    assert not ClipNorms() and ClipNorms(together=1.0)


def test_names_are_unique_and_state_has_its_prefix() -> None:
    variables = [SimpleNamespace(path="dense/kernel"), SimpleNamespace(path="dense/kernel")]
    named = [("", variables[0]), ("", variables[1]), (model_spec.STATE_PREFIX, variables[0])]
    assert model_spec.name_variables(named) == ["dense/kernel", "dense/kernel#2", "/state/dense/kernel"]


@pytest.mark.parametrize(
    ("optimizer", "splits", "together", "name"),
    [
        (lambda: keras.optimizers.Adam(), True, False, "adam"),
        (lambda: keras.optimizers.Adam(clipnorm=1.0), False, False, "adam"),
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), False, True, "sgd"),
        (lambda: keras.optimizers.RMSprop(), True, False, None),
        (lambda: keras.optimizers.Adam(use_ema=True), True, False, None),
        (lambda: keras.optimizers.Muon() if hasattr(keras.optimizers, "Muon") else None, False, False, None),
    ],
)
def test_how_an_optimizer_is_served(optimizer: Any, splits: bool, together: bool, name: str | None) -> None:
    made = optimizer()
    if made is None:
        pytest.skip("this Keras has no such optimizer")
    assert model_spec.can_be_split(made) == splits
    assert model_spec.needs_one_server(made, exact=True) == together
    assert not model_spec.needs_one_server(made, exact=False)
    assert (model_spec.built_in_updater(made) or {"name": None})["name"] == name


def test_servers_get_no_settings_that_workers_have_applied() -> None:
    optimizer = keras.optimizers.SGD(0.1, clipnorm=1.0, loss_scale_factor=4.0)
    text = json.loads(serialize_optimizer(optimizer))
    config = model_spec.strip_worker_settings(text, norms=False)["config"]
    assert (config["clipnorm"], config["loss_scale_factor"]) == (None, None)
    assert model_spec.strip_worker_settings(text, norms=True)["config"]["clipnorm"] == 1.0


def test_only_initializers_of_servers_are_sent() -> None:
    kinds = keras.initializers
    assert model_spec.initializer_config(kinds.RandomUniform(-1, 2)) == {
        "name": "uniform",
        "low": -1.0,
        "high": 2.0,
    }
    assert model_spec.initializer_config(kinds.Ones()) == {"name": "constant", "value": 1.0}
    with pytest.raises(TrainingError, match="GlorotUniform"):
        model_spec.initializer_config(kinds.GlorotUniform())
