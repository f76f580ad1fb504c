"""A replica without peers, on the TensorFlow backend: each of the model's own steps is one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from insitu.train.replica.leaves import flatten_batch, pack_batch
from insitu.train.replica.protocol import Logs
from insitu.train.replica.repeated_rows import tell_repeated_rows
from insitu.train.replica.tensorflow import batch_spec
from insitu.train.replica.tensorflow_calls import compile_call


class FusedTensorFlow:
    """See `FusedReplica`."""

    def __init__(self, model: Any, data: Any) -> None:
        self._model = model
        self._structure = data
        self._signature = [batch_spec(leaf) for leaf in flatten_batch(data)]
        self._train = self._compile(self._trace_train)
        self._test = self._compile(self._trace_test)
        self._predict = self._compile(self._trace_predict)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        return compile_call(function, self._signature, jit_compile=bool(self._model.jit_compile) or None)

    def train(self, data: Any) -> Logs:
        logs: Logs = self._train(*_tensors(data))
        return logs

    def test(self, data: Any) -> Logs:
        logs: Logs = self._test(*_tensors(data))
        return logs

    def predict(self, data: Any) -> Any:
        return keras.tree.map_structure(np.array, self._predict(*_tensors(data)))

    # Traced functions

    def _pack(self, leaves: Any) -> Any:
        return pack_batch(self._structure, leaves)

    def _trace_train(self, *leaves: Any) -> Any:
        with add_up_repeated_rows(self._model):
            return self._model.train_step(self._pack(leaves))

    def _trace_test(self, *leaves: Any) -> Any:
        return self._model.test_step(self._pack(leaves))

    def _trace_predict(self, *leaves: Any) -> Any:
        return self._model.predict_step(self._pack(leaves))


def _tensors(data: Any) -> list[Any]:
    return [tf.constant(leaf) for leaf in flatten_batch(data)]


@contextmanager
def add_up_repeated_rows(model: Any) -> Iterator[None]:
    """While open, optimizers get each row of a sparse gradient once.

    The gradient of an Embedding has an entry for each time that a batch looks a row up. Keras squares and
    clips each entry by itself; a dense gradient, as replicas exchange it, has their sum.
    """
    original = BaseOptimizer.apply
    # XLA knows no arrays whose size depends on values.
    add_up = _make_dense if model.jit_compile else _add_up

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        tell_repeated_rows(optimizer, grads, trainable_variables or optimizer._trainable_variables)
        summed = [add_up(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        return original(optimizer, summed, trainable_variables)

    BaseOptimizer.apply = apply
    try:
        yield
    finally:
        BaseOptimizer.apply = original


def _add_up(gradient: Any) -> Any:
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _make_dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient)
