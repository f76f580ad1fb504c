"""The updaters compute what Keras' optimizers of the same names do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.parameters.updaters import BLOCK, make_updater

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SGD", {"learning_rate": 0.1}, {}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}, {}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}, {}),
    ("SGD", {"learning_rate": 0.1, "weight_decay": 0.01}, {}),
    ("Adam", {"learning_rate": 0.01}, {}),
    ("Adam", {"learning_rate": 0.01, "clip_value": 0.3}, {"clipvalue": 0.3}),
    ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.02}, {}),
    ("Adagrad", {"learning_rate": 0.1}, {}),
    ("Ftrl", {"learning_rate": 0.1}, {}),
    (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.4,
        },
        {},
    ),
]


@pytest.mark.parametrize(("name", "settings", "keras_settings"), CASES)
def test_an_updater_computes_what_keras_optimizer_does(
    name: str, settings: dict[str, Any], keras_settings: dict[str, Any]
):
    import keras

    rng = np.random.default_rng(0)
    first = rng.normal(size=(40, 5)).astype("f4")
    theirs = {k: v for k, v in settings.items() if k != "clip_value"} | keras_settings
    optimizer = getattr(keras.optimizers, name)(**theirs)
    variable = keras.Variable(first)
    updater, value = make_updater({"name": name.lower(), **settings}), first.copy()
    slots = updater.slots("v", value.shape, value.dtype)
    for step in range(5):
        gradient = rng.normal(size=first.shape).astype("f4")
        kept = gradient.copy()
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        updater.update({"v": value}, {"v": gradient}, {"v": slots}, step)
        np.testing.assert_array_equal(gradient, kept)
        np.testing.assert_allclose(value, np.asarray(variable), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "ftrl"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_updating_in_parts_changes_no_bits(name: str, dtype: str):
    rng = np.random.default_rng(0)
    whole = rng.normal(size=2 * BLOCK + 17).astype(dtype)
    gradient = rng.normal(size=whole.size).astype(dtype)
    parts = [whole[:1000].copy(), whole[1000:].copy()]
    updater = make_updater(name)
    updater.update({"": whole}, {"": gradient}, {"": updater.slots("", whole.shape, whole.dtype)}, 0)
    for part, piece in zip(parts, (gradient[:1000], gradient[1000:]), strict=True):
        updater.update({"": part}, {"": piece}, {"": updater.slots("", part.shape, part.dtype)}, 0)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_schedule_gives_the_rate_of_each_step():
    updater = make_updater({"name": "sgd", "learning_rate": lambda step: 0.5 / (1 + step)})
    value = np.zeros(3, "f4")
    for step in range(2):
        updater.update({"": value}, {"": np.ones(3, "f4")}, {"": {}}, step)
    np.testing.assert_allclose(value, -0.75)


@pytest.mark.parametrize(
    "settings", [{"learning_rate": -1}, {"learning_rate": float("nan")}, {"momentum": 2}, {"clip_value": 0}]
)
def test_bad_settings_are_refused(settings: dict[str, float]):
    with pytest.raises(InputError, match="must be"):
        make_updater({"name": "sgd", **settings})
