"""Steps of a probe on the TensorFlow backend: eager, also inside functions of the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from insitu.train.replica import (
    BatchTotals,
    capture_gradients,
    count_losses,
    count_rows,
    map_batch,
    refuse_use_of_updated,
    watch_step,
)
from insitu.train.replica.probe import Outcome, Totals, losses_of, read_logs, to_float64


class TensorFlowSteps:
    """See `Steps`."""

    def __init__(self, model: Any, trainable: Any) -> None:
        self._model = model
        self._trainable = trainable
        self.demands_totals = True
        # A function that was compiled meanwhile would continue without random numbers.
        self._eager = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)

    def train(self, data: Any, *, totals: Totals = None, factor: float = 1.0, shift: float = 0.0) -> Outcome:
        model = self._model

        def on_apply() -> None:
            for variable in self._trainable:
                value = variable._value  # what the step may not read any more
                value.assign_add(tf.cast(tf.fill(value.shape, shift), value.dtype))

        with (
            watch_step(model) as watch,
            losses_of(model, self, totals, data),
            capture_gradients(model.optimizer, on_apply if shift else None) as captured,
            refuse_use_of_updated(model, captured.is_applied),
            self._scaled_gradients(factor) as seen,
        ):
            logs = read_logs(model.train_step(map_batch(tf.constant, data)), watch)
        by_variable = {id(v): g for v, g in zip(captured.variables, captured.gradients, strict=True)}
        gradients = [_dense(v, by_variable.get(id(v))) for v in self._trainable]
        logs = {name: to_float64(value) for name, value in logs.items()}
        return Outcome(gradients, logs, frozenset(watch.means.variables), bool(seen))

    def test(self, data: Any, *, totals: Totals = None) -> Outcome:
        model = self._model
        with watch_step(model) as watch, losses_of(model, self, totals, data):
            logs = read_logs(self._model.test_step(map_batch(tf.constant, data)), watch)
        logs = {name: to_float64(value) for name, value in logs.items()}
        return Outcome([], logs, frozenset(watch.means.variables))

    def count(self, data: Any, *, training: bool) -> Totals:
        model, batch = self._model, map_batch(tf.constant, data)
        with count_losses(model) as counts:
            if training:
                with capture_gradients(model.optimizer, trains=bool(self._trainable)):
                    model.train_step(batch)
            else:
                model.test_step(batch)
        totals = np.array([count_rows(data), *map(float, counts.totals)], np.float32)
        return BatchTotals(totals, counts.rows)

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(map_batch(tf.constant, data))
        options = {"training": training} if self._model._call_has_training_arg else {}
        return [to_float64(leaf) for leaf in keras.tree.flatten(self._model(x, **options))]

    def close(self, *, chance_used: bool) -> None:
        del chance_used  # each step draws its random numbers again
        tf.config.run_functions_eagerly(self._eager)

    @contextlib.contextmanager
    def _scaled_gradients(self, factor: float) -> Iterator[list[bool]]:
        """While open, scale what tapes give for trainable variables. The list isn't empty once one did."""
        seen: list[bool] = []
        original = tf.GradientTape.gradient
        own = {id(v) for v in self._trainable} | {id(v._value) for v in self._trainable}

        def gradient(tape: Any, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
            results = original(tape, target, sources, *arguments, **options)
            if not any(id(source) in own for source in keras.tree.flatten(sources)):
                return results
            seen.append(True)
            return results if factor == 1 else tf.nest.map_structure(lambda g: _scale(g, factor), results)

        tf.GradientTape.gradient = gradient
        try:
            yield seen
        finally:
            tf.GradientTape.gradient = original


def _scale(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient * tf.cast(factor, gradient.dtype)


def _dense(variable: Any, gradient: Any) -> NDArray[np.float64]:
    if gradient is None:
        return np.zeros(tuple(variable.shape))
    return to_float64(tf.convert_to_tensor(gradient))
