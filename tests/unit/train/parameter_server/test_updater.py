"""The updater of a model on a server leaves state to itself and variables to an optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.parameter_server.model_spec import STATE_PREFIX, updater_config
from insitu.train.parameter_server.updater import make_model_updater

MEAN = f"{STATE_PREFIX}mean"


def updated(config: dict[str, Any], steps: int = 1) -> dict[str, list[float]]:
    updater = make_model_updater({**config, "has_state": True})
    values = {"w": np.ones(2, "float32"), MEAN: np.ones(2, "float32")}
    slots = {name: updater.slots(name, value.shape, value.dtype) for name, value in values.items()}
    assert slots[MEAN] == {}
    for step in range(steps):
        updater.update(values, {name: np.full(2, 0.5, "float32") for name in values}, slots, step)
    return {name: value.tolist() for name, value in values.items()}


@pytest.mark.parametrize("exact", [True, False])
def test_state_is_assigned_or_added_to(exact: bool) -> None:
    config = updater_config(keras.optimizers.SGD(1.0), exact=exact, jit=False)
    found = updated(config)
    assert found["w"] == [0.5, 0.5]
    assert found[MEAN] == ([0.5, 0.5] if exact else [1.5, 1.5])


def test_a_schedule_is_asked_for_each_step() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    config = updater_config(keras.optimizers.SGD(schedule), exact=False, jit=False)
    assert updated(config, steps=2)["w"] == [1 - 0.5 * 1.0 - 0.5 * 0.5] * 2
