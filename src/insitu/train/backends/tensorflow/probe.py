"""Steps of a probe on the TensorFlow backend: eager, also inside functions of the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from insitu.train.replica.probe import EagerSteps


class TensorFlowSteps(EagerSteps):
    """See `Steps`."""

    def __init__(self, model: Any, trainable: Any) -> None:
        super().__init__(model, trainable)
        # A function that was compiled meanwhile would continue without random numbers.
        self._eager = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)

    def _to_tensor(self, leaf: Any) -> Any:
        return tf.constant(leaf)

    def _whole(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient)

    def _shift(self, shift: float) -> None:
        for variable in self._trainable:
            value = variable._value  # what the step may not read any more
            value.assign_add(tf.cast(tf.fill(value.shape, shift), value.dtype))

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
