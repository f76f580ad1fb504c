"""The updater of a model on a server leaves state to itself and variables to an optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.parameters.updaters import record_staleness
from insitu.train.parameter_server.model_spec import STATE_PREFIX, updater_config
from insitu.train.parameter_server.server_task import make_model_updater

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
def test_state_is_what_was_pushed(exact: bool) -> None:
    config = updater_config(keras.optimizers.SGD(1.0), exact=exact, jit=False)
    assert updated(config) == {"w": [0.5, 0.5], MEAN: [0.5, 0.5]}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=8), st.floats(0.0, 1.0), st.integers(1, 4))
def test_a_moving_average_of_many_workers_is_their_mean(
    batches: list[float], kept: float, rounds: int
) -> None:
    """Each round, all begin with the same value and push one after the other."""
    config = updater_config(keras.optimizers.SGD(1.0), exact=False, jit=False)
    updater: Any = make_model_updater({**config, "has_state": True})
    value, expected = {MEAN: np.ones(1)}, 1.0
    for _ in range(rounds):
        start = value[MEAN].copy()
        for staleness, batch in enumerate(batches):
            record_staleness(updater, staleness)
            updater.update(value, {MEAN: kept * start + (1 - kept) * batch}, {}, 0)
            assert min(1.0, *batches) - 1e-9 <= value[MEAN][0] <= max(1.0, *batches) + 1e-9
        expected = kept * expected + (1 - kept) * np.mean(batches)
    np.testing.assert_allclose(value[MEAN], expected, rtol=1e-9)


def test_a_schedule_is_asked_for_each_step() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    config = updater_config(keras.optimizers.SGD(schedule), exact=False, jit=False)
    assert updated(config, steps=2)["w"] == [1 - 0.5 * 1.0 - 0.5 * 0.5] * 2
