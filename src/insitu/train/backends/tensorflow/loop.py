"""Custom loops on the TensorFlow backend: the step becomes a graph, whatever it is written in."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from insitu.train.backends.tensorflow import tf_distribute, tf_function
from insitu.train.backends.tensorflow.replica import TensorFlowReplica
from insitu.train.backends.tensorflow.several_devices import TensorFlowMultiDeviceReplica
from insitu.train.custom_loop import CompiledGradientMixin, StepModel
from insitu.train.replica import Logs, ShardBatch


@functools.cache
def make_trackable(data: type[Any]) -> type[Any]:
    """See `Backend`."""

    def serialize(self: Any) -> str:
        return json.dumps(self.state_dict())

    def deserialize(self: Any, text: Any) -> None:
        self.load_state_dict(json.loads(text))

    methods = {"serialize": serialize, "deserialize": deserialize, "__module__": data.__module__}
    return type(data.__name__, (data, tf.train.experimental.PythonState), methods)


def trace_step(model: StepModel, example: list[Any]) -> list[Any]:
    """See `Backend`."""
    specs = [tf.TensorSpec((None, *a.shape[1:]), tf.as_dtype(a.dtype)) for a in map(np.asarray, example)]

    def trace(*arrays: Any) -> list[Any]:
        return [tf.identity(t) for t in model.trace(arrays, tf.init_scope)]

    untraced = tf.function(tf.autograph.experimental.do_not_convert(trace))
    with tf_distribute.refuse_raw_variables():
        try:
            traced = untraced.get_concrete_function(*specs)
        except tf.errors.OperatorNotAllowedInGraphError:
            # Python's `if` and `for` over tensors, which AutoGraph makes operations of, as in a tf.function.
            model.rewrite(tf_function.convert)
            traced = untraced.get_concrete_function(*specs)
    reached = _find_inputs(traced.graph.outputs)
    handles = {id(external) for external, inner in traced.graph.captures if id(inner) in reached}
    return [v for v in model.metrics_variables if id(getattr(v._value, "handle", None)) in handles]


def _find_inputs(outputs: Sequence[Any]) -> set[int]:
    """Return the ids of all tensors that `outputs` are computed from."""
    reached: set[int] = set()
    waiting = list(outputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in reached:
            reached.add(id(tensor))
            waiting.extend(tensor.op.inputs)
    return reached


class LoopReplica(CompiledGradientMixin, TensorFlowReplica):
    """See `insitu.train.custom_loop.LoopReplica`."""

    def _keep_outputs(self, *tensors: Any) -> Sequence[Any]:
        results = self._compiled(*tensors)
        own = 1 + len(self._all_buckets)
        self.outputs[self._shard] = list(results[own:])
        return list(results[:own])

    def watch_weights(self, variables: Any) -> bool:
        """Watch nothing: what the compiled function returns beside the gradient are the step's outputs."""
        return False

    def _trace_gradient(self, shard: Any, *leaves: Any) -> list[Any]:
        results = super()._trace_gradient(shard, *leaves)
        return [*results, *map(tf.identity, self._model.outputs)]


class LoopDeviceReplicas(TensorFlowMultiDeviceReplica):
    """See `insitu.train.custom_loop.LoopDeviceReplicas` and `MultiDeviceLoopReplica`."""

    def __init__(self, model: StepModel, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._without_gradient = model.without_gradient
        self.outputs: dict[int, list[Any]] = {}

    def train(self, parts: Sequence[ShardBatch]) -> Logs:
        outputs = self._train_all(*self._arguments(parts))
        self._keep(parts, outputs)
        return {}

    def _all_gradients(self, parts: Sequence[ShardBatch]) -> list[list[Any]]:
        results = super()._all_gradients(parts)
        own = self._own_results
        self._keep(parts, [result[own:] for result in results])
        return [result[:own] for result in results]

    def _keep(self, parts: Sequence[ShardBatch], outputs: Sequence[Sequence[Any]]) -> None:
        for part, own in zip(parts, outputs, strict=True):
            if part.rows:
                self.outputs[part.shard] = list(own)

    def _make_padding(self, parts: Sequence[ShardBatch]) -> Any:
        # Whole: which of a step's arrays hold rows isn't known.
        return next(part.data for part in parts if part.rows)

    @property
    def _own_results(self) -> int:
        """How many results of a replica come before the outputs of the user's step."""
        return 1 + len(self._all_buckets)

    def _trace_gradient(self, shard: Any, *leaves: Any) -> list[Any]:
        results = super()._trace_gradient(shard, *leaves)
        return [*results, *map(tf.identity, self._model.outputs)]

    def _trace_train_all(self, rows: Any, *leaves: Any) -> Any:
        results, own = self._trace_gradients_all(rows, *leaves), self._own_results
        self._update_all([result[:own] for result in results], rows)
        return [result[own:] for result in results]
