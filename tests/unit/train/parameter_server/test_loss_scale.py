"""Each worker scales its own losses, as a LossScaleOptimizer does."""

from __future__ import annotations

import keras
import numpy as np

from insitu.train.parameter_server.step import LossScale
from insitu.train.replica import inner_optimizer


def test_the_scale_halves_where_a_gradient_overflows_and_doubles_after_steps_without() -> None:
    sgd = keras.optimizers.SGD()
    optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0, dynamic_growth_steps=2)
    optimizer.build([keras.Variable(np.zeros(1, "float32"))])
    assert inner_optimizer(optimizer) is sgd and inner_optimizer(sgd) is sgd
    scale = LossScale(optimizer)
    assert scale.changes and not LossScale(sgd).changes
    seen = []
    for gradient in (8.0, np.inf, 8.0, 8.0, 8.0):
        values = np.full(3, gradient, "float32")
        scale.begin()
        pushed = scale.unscale(values)
        scale.end()
        seen.append((pushed, float(values[0])))
    assert seen == [(True, 1.0), (False, np.inf), (True, 2.0), (True, 2.0), (True, 1.0)]


def test_a_fixed_factor_is_divided_by() -> None:
    gradient = np.full(2, 6.0, "float32")
    assert LossScale(keras.optimizers.SGD(loss_scale_factor=3.0)).unscale(gradient)
    assert gradient.tolist() == [2, 2]
