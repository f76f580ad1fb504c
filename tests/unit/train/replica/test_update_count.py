"""A model's updates are found in the optimizer that makes them, and in its saved state."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from insitu.train.replica import inner_optimizer, name_update_count, read_state, read_update_count, views

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("scales", [False, True])
def test_the_count_of_a_saved_state_is_that_of_the_optimizer_that_updates(scales: bool) -> None:
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(sgd) if scales else sgd, "mse")
    model.fit(np.ones((12, 2)), np.ones((12, 1)), batch_size=4, verbose=0)
    assert inner_optimizer(model.optimizer) is sgd and inner_optimizer(sgd) is sgd
    saved = dict(views(read_state(model)))
    assert saved[name_update_count(model.optimizer)] == 3


@pytest.mark.parametrize("scales", [False, True])
def test_gradients_that_are_accumulated_make_an_update_together(scales: bool) -> None:
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(sgd) if scales else sgd, "mse")
    for updates in (0, 1, 1, 2):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=4, verbose=0)
        assert read_update_count(model.optimizer) == updates
        assert keras.ops.convert_to_numpy(sgd.iterations) == updates
