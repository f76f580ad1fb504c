"""Custom loops on the TensorFlow backend: the step becomes a graph, whatever it is written in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from insitu.train.backends.tensorflow import TensorFlowReplica
from insitu.train.loops.backends import OneCompiledGradient
from insitu.train.loops.program import StepModel


def learn(model: StepModel, example: list[Any]) -> None:
    """See `insitu.train.loops.backends.learn`."""
    specs = [tf.TensorSpec((None, *a.shape[1:]), tf.as_dtype(a.dtype)) for a in map(np.asarray, example)]

    def trace(*arrays: Any) -> list[Any]:
        return [tf.identity(t) for t in model.watch(arrays)]

    tf.function(tf.autograph.experimental.do_not_convert(trace)).get_concrete_function(*specs)


class LoopReplica(OneCompiledGradient, TensorFlowReplica):
    """See `insitu.train.loops.backends.LoopReplica`."""

    def _keep_outputs(self, *tensors: Any) -> Sequence[Any]:
        results = self._compiled(*tensors)
        own = 1 + len(self._all_pieces)
        self.outputs[self._shard] = list(results[own:])
        return list(results[:own])

    def _trace_gradient(self, shard: Any, *leaves: Any) -> list[Any]:
        results = super()._trace_gradient(shard, *leaves)
        return [*results, *map(tf.identity, self._model.outputs)]
