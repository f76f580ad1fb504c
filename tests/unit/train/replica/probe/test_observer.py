"""A model may be run, and is afterwards as it was."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from insitu.train.replica.building import build_to_train
from insitu.train.replica.probe.neutral import Chance
from insitu.train.replica.probe.observer import MOVED, RESET, TEST, TRAIN, Observer, make_rows

EXAMPLE = (np.zeros((1, 2), "float32"), np.zeros((1, 1), "float32"))


class Smallest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="smallest")
        self.value = self.add_weight(name="value", initializer="ones")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(p)))

    def reset_state(self):
        self.value.assign(1e9)

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


class Counts(keras.Model):
    """Counts its steps in an attribute, too."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")
        self.steps = 0

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
        return self.out(x)

    def train_step(self, data):
        self.steps += 1
        return super().train_step(data)


def built(*metrics: Any) -> Counts:
    keras.utils.set_random_seed(5)
    model = Counts()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=list(metrics))
    build_to_train(model, EXAMPLE)
    return model


def snapshot(model: Counts) -> Any:
    variables = (*model.variables, *model.metrics_variables, *model.optimizer.variables)
    return [v.numpy().tobytes() for v in variables], model.steps, model.losses


def test_nothing_is_left_behind() -> None:
    model = built(Smallest())
    x = np.ones((4, 2), "float32")
    model.train_on_batch(x, x[:, :1])
    before = snapshot(model)
    rows = make_rows(EXAMPLE, lowest=0)
    with Observer(model, Chance()) as observer:
        observer.begin(own_weights=False)
        observer.run(TRAIN, rows, MOVED, weights_moved=True)
        observer.run(TEST, rows)
        assert snapshot(model)[0] != before[0]
        assert observer.sees_updates(rows, 1e-3) is False
    assert snapshot(model) == before


def test_runs_begin_where_they_are_asked_to() -> None:
    model = built(Smallest())
    rows = make_rows(EXAMPLE, lowest=0)
    with Observer(model, Chance()) as observer:
        observer.begin(own_weights=True)
        assert observer.metrics_start_elsewhere()
        (smallest,) = (c.variable for c in observer.candidates if c.variable.name == "value")
        seen, key = id(model.seen), id(smallest)
        zeros, reset = observer.run(TRAIN, rows), observer.run(TRAIN, rows, RESET)
        moved = observer.run(TRAIN, rows, weights_moved=True)
    assert (zeros.before[key], reset.before[key]) == (0, 1e9)
    assert zeros.before[seen] == 0
    assert moved.before[seen] == 3
    assert moved.whole_after[seen] == 4
    assert len(zeros.parts) == 2
    assert zeros.whole.gradients[0].shape == (2, 1)
