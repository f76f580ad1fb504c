"""A Keras optimizer on a server updates arrays as the same optimizer updates variables."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import server_optimizers
from backend_checks import result_of, script_for

from insitu.base.errors import TrainingError
from insitu.train.parameter_server.keras_optimizer import (
    KerasUpdater,
    make_optimizer,
    public_class,
    serialize_optimizer,
)

VALUES = {"a": np.array([1.0, -2.0], "float32"), "b": np.array([[3.0]], "float32")}
GRADIENTS = [
    {"a": np.array([0.5, 0.25], "float32"), "b": np.array([[-1.0]], "float32")},
    {"a": np.array([-3.0, 1.0], "float32"), "b": np.array([[2.0]], "float32")},
]


def by_keras(optimizer: Any) -> dict[str, Any]:
    variables = {name: keras.Variable(value) for name, value in VALUES.items()}
    for gradients in GRADIENTS:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients.values()], variables.values())
    return {name: variable.numpy() for name, variable in variables.items()}


def by_updater(optimizer: Any) -> tuple[KerasUpdater, dict[str, Any], dict[str, Any]]:
    updater = KerasUpdater(serialize_optimizer(optimizer), jit=False)
    values = {name: value.copy() for name, value in VALUES.items()}
    slots = {name: updater.slots(name, value.shape, value.dtype) for name, value in values.items()}
    for step, gradients in enumerate(GRADIENTS):
        updater.update(values, gradients, slots, step)
    return updater, values, slots


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
        lambda: keras.optimizers.Nadam(0.1),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    ],
)
def test_values_are_those_of_the_optimizer_on_variables(make: Any) -> None:
    _, values, _ = by_updater(make())
    for name, expected in by_keras(make()).items():
        np.testing.assert_allclose(values[name], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("tensorflow", marks=pytest.mark.long),
        pytest.param("jax", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.torch),
    ],
)
def test_each_of_keras_optimizers_trains_in_each_mode_as_without_servers(
    backend: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, *script_for(backend, Path(server_optimizers.__file__))],
        env={**os.environ, "KERAS_BACKEND": backend, "INSITU_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    differences: dict[str, float] = result_of(process)
    assert len(differences) >= 3 * 12
    assert {name: far for name, far in differences.items() if not far < 2e-5} == {}


def test_the_names_are_those_that_any_backend_knows() -> None:
    other = type(
        "Adam", (keras.optimizers.Adam,), {"__module__": "keras.src.backend.torch.optimizers.torch_adam"}
    )
    assert public_class(other(0.1)) is keras.optimizers.Adam
    config = json.loads(serialize_optimizer(other(0.1)))
    assert (config["module"], config["class_name"]) == ("keras.optimizers", "Adam")
    own = type("Adam", (keras.optimizers.Adam,), {"__module__": "my_optimizers"})
    assert public_class(own(0.1)) is own
    assert json.loads(serialize_optimizer(own(0.1)))["module"] == "my_optimizers"


def test_slots_begin_with_the_first_values() -> None:
    updater = KerasUpdater(serialize_optimizer(StartsAtValues(0.1)), jit=False)
    slots = {"a": updater.slots("a", (2,), np.dtype("float32"))}
    updater.initialise({"a": VALUES["a"]}, slots)
    assert [array.tolist() for array in slots["a"].values()] == [[1.0, -2.0]]


@keras.saving.register_keras_serializable("insitu_tests")
class StartsAtValues(keras.optimizers.SGD):
    """Keeps what each variable was at first."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.first = [self.add_variable_from_reference(v, "first") for v in variables]
        for first, variable in zip(self.first, variables, strict=True):
            first.assign(variable)


def test_gradients_are_left_as_they_were() -> None:
    before = [{name: g.copy() for name, g in gradients.items()} for gradients in GRADIENTS]
    by_updater(keras.optimizers.SGD(0.1, global_clipnorm=0.1))
    for left, right in zip(before, GRADIENTS, strict=True):
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])


def test_another_updater_goes_on_from_slots_of_a_checkpoint() -> None:
    make = lambda: keras.optimizers.RMSprop(0.1, momentum=0.5)  # noqa: E731
    updater = KerasUpdater(serialize_optimizer(make()), jit=False)
    values = {name: value.copy() for name, value in VALUES.items()}
    slots = {name: updater.slots(name, value.shape, value.dtype) for name, value in values.items()}
    updater.update(values, GRADIENTS[0], slots, 0)
    KerasUpdater(serialize_optimizer(make()), jit=False).update(values, GRADIENTS[1], slots, 1)
    for name, expected in by_keras(make()).items():
        np.testing.assert_allclose(values[name], expected, rtol=1e-6)


def test_a_learning_rate_that_is_set_takes_the_place_of_the_configured_one() -> None:
    updater = KerasUpdater(serialize_optimizer(keras.optimizers.SGD(0.5)), jit=False)
    updater.learning_rate = 0.25
    value = np.array([1.0], "float32")
    slots = {"a": updater.slots("a", (1,), value.dtype)}
    updater.update({"a": value}, {"a": np.array([2.0], "float32")}, slots, 0)
    assert value.tolist() == [0.5]
    updater.update({}, {}, {}, 1)  # a server may hold no piece


def test_final_values_are_the_averages_where_the_optimizer_keeps_them() -> None:
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    updater, values, slots = by_updater(optimizer)
    last = {name: value.copy() for name, value in values.items()}
    fresh = KerasUpdater(serialize_optimizer(optimizer), jit=False)  # of a server that has taken over
    fresh.finalize(values, slots)
    assert all((values[name] != last[name]).any() for name in values)
    plain, unchanged, plain_slots = by_updater(keras.optimizers.SGD(1.0))
    before = {name: value.copy() for name, value in unchanged.items()}
    plain.finalize(unchanged, plain_slots)
    assert all((unchanged[name] == before[name]).all() for name in before)
    assert updater.elementwise is False


def test_rows_of_tables_have_updaters_of_their_own() -> None:
    updater = KerasUpdater(serialize_optimizer(keras.optimizers.SGD()), jit=False)
    for call in (updater.row_slots, lambda: updater.update_rows(VALUES["a"], VALUES["a"], {}, 0)):
        with pytest.raises(NotImplementedError):
            call()


def test_an_optimizer_goes_as_its_configuration() -> None:
    made = make_optimizer(serialize_optimizer(keras.optimizers.Adam(0.25, beta_1=0.5)))
    assert type(made) is keras.optimizers.Adam and made.get_config()["beta_1"] == 0.5


def test_a_configuration_that_is_no_plain_value_is_refused() -> None:
    class Odd(keras.optimizers.SGD):
        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "odd": object()}

    with pytest.raises(TrainingError, match=r"must be plain values. Received: Odd"):
        serialize_optimizer(Odd())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"class_name": "Nowhere", "module": "nowhere", "config": {}, "registered_name": "mine>Own"}, "Own"),
        ({"class_name": "Dense", "module": "keras.layers", "config": {"units": 1}}, "Dense"),
    ],
)
def test_a_server_must_know_the_optimizers_class(config: Any, named: str) -> None:
    with pytest.raises(TrainingError, match=f"{named}. Define it before the strategy"):
        make_optimizer(json.dumps(config))


@keras.saving.register_keras_serializable("test_keras_optimizer")
class Own(keras.optimizers.SGD):
    pass


class Unregistered(keras.optimizers.SGD):
    """A server can't tell it from any other class of the script's."""


class Trap:
    """No optimizer: to build it is the attack."""

    built = 0

    @classmethod
    def from_config(cls, config: Any) -> Trap:
        Trap.built += 1
        return cls()


MODULE = types.ModuleType("modules_of_the_script")
for _class in (Trap, Unregistered):
    _class.__module__ = MODULE.__name__
    setattr(MODULE, _class.__name__, _class)
sys.modules[MODULE.__name__] = MODULE


def own_config(name: str, **config: Any) -> dict[str, Any]:
    return {"class_name": name, "module": MODULE.__name__, "config": config, "registered_name": None}


@pytest.mark.parametrize(
    "config",
    [
        own_config("Trap"),
        own_config("Unregistered"),
        {
            **own_config("Own", learning_rate=own_config("Trap")),
            "registered_name": "test_keras_optimizer>Own",
        },
        {
            **own_config("Adam", learning_rate=0.1, more=[{"deep": own_config("Trap")}]),
            "module": "keras.optimizers",
        },
        {"class_name": "function", "config": "system", "module": "os", "registered_name": "function"},
        {"class_name": "__lambda__", "config": {"value": "x"}},
        {
            "class_name": "__typespec__",
            "config": [],
            "spec_name": "x",
            "module": "os",
            "registered_name": None,
        },
        {"class_name": "Sequential", "module": "keras", "config": {"layers": []}, "registered_name": None},
        {"class_name": "Adam", "module": "keras.optimizers.evil", "config": {}, "registered_name": None},
        {**own_config("Unregistered"), "compile_config": {}},
    ],
)
def test_no_other_class_is_built(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Keras 3.11.0 to build a `TorchModuleWrapper` ran what its configuration held."""
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", lambda name, *_: imported.append(name))
    with pytest.raises(TrainingError, match="must know the optimizer's class"):
        make_optimizer(json.dumps(config))
    assert (Trap.built, imported) == (0, [])


@pytest.mark.parametrize(
    "optimizer",
    [
        Own(0.25),
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.25, 100)),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25, momentum=0.5)),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimizers_and_schedules_are_built(optimizer: Any) -> None:
    made = make_optimizer(serialize_optimizer(optimizer))
    assert type(made) is type(optimizer) and made.get_config() == optimizer.get_config()
