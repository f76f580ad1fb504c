"""Servers update each variable by the optimizer that a MultiOptimizer chooses for it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.parameter_server.model_spec import STATE_PREFIX
from insitu.train.parameter_server.optimizer_settings import OptimizerSettings, describe_update, has_several
from insitu.train.parameter_server.server_task import make_model_updater
from insitu.train.replica import to_numpy

FIRST = {"a": np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3), "b": np.ones(4, "float32")}
MEAN = f"{STATE_PREFIX}mean"


def make(**of_a: Any) -> Any:
    chosen = {"a": keras.optimizers.Ftrl(0.3, **of_a), "b": keras.optimizers.Adagrad(0.1)}
    return keras.optimizers.MultiOptimizer(lambda variable: chosen[variable.name])


def make_variables() -> dict[str, Any]:
    return {name: keras.Variable(value, name=name) for name, value in FIRST.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=value.shape).astype("float32") for name, value in FIRST.items()}


def train_in_keras(optimizer: Any) -> dict[str, np.ndarray]:
    variables = make_variables()
    for step in range(3):
        given = [keras.ops.convert_to_tensor(g) for g in gradients(step).values()]
        optimizer.apply(given, list(variables.values()))
    return {name: to_numpy(variable) for name, variable in variables.items()}


def train_on_servers(optimizer: Any, *, exact: bool, only: str | None = None) -> dict[str, np.ndarray]:
    """Train as a server does that has all variables, or one."""
    update = describe_update(optimizer, {**make_variables(), MEAN: None}, exact=exact, jit=False)
    assert not update.can_be_split and len(update.members) == 2
    updater = make_model_updater({**json.loads(json.dumps(update.config)), "has_state": True})
    values = {name: value.copy() for name, value in FIRST.items() if only in (None, name)}
    slots = {name: updater.slots(name, value.shape, value.dtype) for name, value in values.items()}
    for step in range(3):
        updater.update(values, gradients(step), slots, step)
    return values


@pytest.mark.parametrize("exact", [True, False])
def test_each_variable_has_the_values_of_its_optimizer(exact: bool) -> None:
    expected = train_in_keras(make())
    found = train_on_servers(make(), exact=exact)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7)
    alone = train_on_servers(make(), exact=exact, only="b")
    np.testing.assert_array_equal(alone["b"], found["b"])


def test_norms_of_a_member_are_bounded_by_the_servers() -> None:
    optimizer = make(global_clipnorm=0.5)
    update = describe_update(optimizer, make_variables(), exact=False, jit=False)
    assert update.together and not update.finalizes
    updater = make_model_updater({**update.config, "has_state": False})
    values = {name: value.copy() for name, value in FIRST.items()}
    slots = {name: updater.slots(name, value.shape, value.dtype) for name, value in values.items()}
    for step in range(3):
        updater.update(values, gradients(step), slots, step)
    expected = train_in_keras(make(global_clipnorm=0.5))
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-6, atol=1e-7)


def test_one_optimizer_is_none_of_several() -> None:
    assert has_several(make()) and not has_several(keras.optimizers.SGD())
    assert describe_update(keras.optimizers.SGD(), {}, exact=False, jit=False).members == ()


def test_a_setting_of_a_member_that_changes_later_is_refused() -> None:
    optimizer = make()
    members = describe_update(optimizer, make_variables(), exact=False, jit=False).members
    client = SimpleNamespace(is_chief=True, learning_rates={})
    settings = OptimizerSettings(optimizer, client, members=members)
    settings.send()
    members[1].learning_rate = 0.05
    with pytest.raises(TrainingError, match=r"optimizers\[1\]\.learning_rate = 0\.05.*nothing may be set"):
        settings.send()
