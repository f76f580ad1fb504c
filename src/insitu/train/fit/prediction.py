"""Predicts for one step after the other, and lets callbacks hear of it as Keras does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from insitu.train.replica import StepBatch


class PredictionLoop:
    """Runs the steps of one `predict`. Callbacks hear of whole executions of `steps_per_execution` steps."""

    def __init__(
        self, model: Any, callbacks: Sequence[Any], verbose: Any, asked: int | None, known: int | None
    ) -> None:
        """`asked` is the number of steps that the user gave, `known` that of the data."""
        self._model = model
        self._per_execution = int(model.steps_per_execution)
        #: The number of steps at which to end: Keras does whole executions. None for all of the data.
        self._limit = -(-asked // self._per_execution) * self._per_execution if asked else None
        self._callbacks = keras.callbacks.CallbackList(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=asked or known,
            model=model,
        )

    def run(
        self,
        read_steps: Callable[[int], Iterator[StepBatch]],
        outputs: list[Any],
        predict: Callable[[int, StepBatch], Any],
    ) -> Any:
        """Return the outputs for all rows. Those of the first steps may be there already; the others are
        appended. `read_steps` gives the steps from a number on, `predict` the outputs for one."""
        self._model.stop_predicting = False
        self._callbacks.on_predict_begin()
        index = len(outputs)
        steps = read_steps(index)
        while index != self._limit and (batch := next(steps, None)) is not None:
            begin = index
            self._callbacks.on_predict_batch_begin(begin)
            while batch is not None:
                outputs.append(predict(index, batch))
                index += 1
                batch = next(steps, None) if index % self._per_execution else None
            self._callbacks.on_predict_batch_end(index - 1, {"outputs": _concatenate(outputs[begin:])})
            if self._model.stop_predicting:
                break
        self._callbacks.on_predict_end()
        return _concatenate(outputs)


def _concatenate(outputs: Sequence[Any]) -> Any:
    """Return the outputs of several steps as one."""
    if len(outputs) == 1:
        return outputs[0]
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)
