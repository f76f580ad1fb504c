"""Steps that use weights after their update are refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.replica.updated_weights import UpdatedValue, refuse_use_of_updated


def built(*layers: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), *(layers or [keras.layers.Dense(2)])])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


USES = {
    "arithmetic": lambda model, v: v * 2.0,
    "an operation": lambda model, v: keras.ops.sum(v),
    "its value": lambda model, v: keras.ops.clip(v.value, 0, 1),
    "its numbers": lambda model, v: np.asarray(v),
    "a forward pass": lambda model, v: model(np.ones((1, 2), "float32")),
    "the number of updates": lambda model, v: keras.ops.add(model.optimizer.iterations, 1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_after_the_update_is_refused(use: Any) -> None:
    model, applied = built(), []
    variable = model.trainable_variables[0]
    before = variable.numpy()
    with refuse_use_of_updated(model, lambda: bool(applied)):
        use(model, variable)
        applied.append(True)
        assert isinstance(variable.value, UpdatedValue)
        assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
        with pytest.raises(TrainingError, match=r"^A train_step can't .*apply\(\).*constraint="):
            use(model, variable)
    assert np.array_equal(variable.numpy(), before)


def test_an_assignment_is_refused_at_any_time() -> None:
    model = built()
    with refuse_use_of_updated(model, lambda: False):
        with pytest.raises(TrainingError, match=r"an assignment of '.*dense"):
            model.trainable_variables[0].assign(np.zeros((2, 2)))
        with pytest.raises(TrainingError, match=r"an assignment of '.*dense"):
            model.trainable_variables[0].assign_sub(np.zeros((2, 2)))
        model.optimizer.iterations.assign(3)
    model.trainable_variables[0].assign(np.zeros((2, 2)))


def test_layers_of_keras_that_normalize_their_kernel_may() -> None:
    model = built(keras.layers.SpectralNormalization(keras.layers.Dense(2)))
    with refuse_use_of_updated(model, lambda: False):
        model(np.ones((3, 2), "float32"), training=True)
