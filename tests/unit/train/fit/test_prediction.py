"""Callbacks hear of whole executions of a prediction, and can stop it."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.fit.trainer import PredictionLoop


class Heard(keras.callbacks.Callback):
    """Records the events of batches; sets `stop_predicting` at the step `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.stop = stop
        self.begun: list[int] = []
        self.ended: dict[int, list[float]] = {}

    def on_predict_begin(self, logs: Any = None) -> None:
        # Keras looks at it after a step only.
        self.model.stop_predicting = self.stop == -1

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun.append(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended[batch] = logs["outputs"].tolist()
        self.model.stop_predicting = batch == self.stop or self.stop == -1


def run(
    per_execution: int, heard: Heard, *, data: int | None = 7, asked: int | None = None, done: int = 0
) -> list[float]:
    """Return the outputs over `data` steps, endless without; step i gives the one number i."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.steps_per_execution = per_execution
    outputs = [np.array([float(index)]) for index in range(done)]
    read: list[int] = []

    def steps(start: int) -> Any:
        for index in itertools.count(start) if data is None else range(start, data):
            read.append(index)
            yield index

    loop = PredictionLoop(model, keras.callbacks.CallbackList([heard], model=model), asked)
    result = loop.run(steps, outputs, lambda index, batch: np.array([float(batch)]))
    assert read == list(range(done, len(outputs))), "no step is read that isn't predicted"
    return list(result)


@pytest.mark.parametrize("asked", [None, 7, 100])
def test_callbacks_hear_of_whole_executions(asked: int | None) -> None:
    heard = Heard()
    assert run(3, heard, asked=asked) == list(range(7))
    assert heard.begun == [0, 3, 6]
    assert heard.ended == {2: [0, 1, 2], 5: [3, 4, 5], 6: [6]}


def test_keras_rounds_the_steps_up_to_whole_executions() -> None:
    assert run(3, Heard(), asked=4) == list(range(6))


@pytest.mark.parametrize(("stop", "expected"), [(3, 4), (-1, 2)])
def test_a_callback_ends_endless_data(stop: int, expected: int) -> None:
    assert run(2, Heard(stop), data=None) == list(range(expected))


def test_who_takes_up_a_prediction_has_whole_executions_too() -> None:
    """The list of callbacks leaves out those that others have heard of."""
    heard = Heard()
    assert run(3, heard, done=4) == list(range(7))
    assert heard.begun == [0, 3, 6]
    assert heard.ended == {2: [0, 1, 2], 5: [3, 4, 5], 6: [6]}
