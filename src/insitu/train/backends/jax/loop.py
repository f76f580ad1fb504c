"""Custom loops on the JAX backend: the step becomes a pure function of the variables that it touches."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from jax._src.core import trace_state_clean
from jax._src.interpreters.partial_eval import dce_jaxpr

from insitu.base.errors import TrainingError
from insitu.train.backends.jax.replica import JaxReplica
from insitu.train.backends.jax.several_devices import JaxMultiDeviceReplica
from insitu.train.custom_loop import CompiledGradientMixin, DeferredUpdates, StepModel


def leave_graph(name: str) -> None:
    """Raise TrainingError in a function that JAX compiles or differentiates."""
    if not trace_state_clean():
        raise TrainingError(
            f"{name} compiles the step itself, and moves values between tasks outside of compiled functions. "
            "Received: a call in a function that jax.jit, jax.grad or the like traces. Leave that out."
        )


def trace_step(model: StepModel, example: list[Any]) -> list[Any]:
    """See `Backend`."""
    arrays = [np.asarray(array) for array in example]
    jax.eval_shape(lambda given: model.trace(given, jax.ensure_compile_time_eval), arrays)
    metrics = model.metrics_variables
    if not metrics or not model.outputs:
        return []

    def outputs(values: list[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(metrics, values, strict=True))):
            model.call(arrays, DeferredUpdates())
        return model.outputs

    traced = jax.make_jaxpr(outputs)([variable.value for variable in metrics]).jaxpr
    _, used = dce_jaxpr(traced, [True] * len(traced.outvars))
    return [variable for variable, is_used in zip(metrics, used, strict=True) if is_used]


class _OutputsMixin(CompiledGradientMixin):
    """The common part of the replicas below."""

    _model: StepModel

    def start_gradient(self, shard: int, data: Any) -> Any:
        self._shard = shard
        return super().start_gradient(shard, data)  # type: ignore[misc]

    def _keep_outputs(self, *arguments: Any) -> Any:
        results, self.outputs[self._shard] = self._compiled(*arguments)
        return results

    def _trace_gradient(self, state: Any, offset: Any, leaves: Any, totals: Any = None) -> Any:
        results = super()._trace_gradient(state, offset, leaves, totals)  # type: ignore[misc]
        return results, list(self._model.outputs)


class LoopReplica(_OutputsMixin, JaxReplica):
    """See `insitu.train.custom_loop.LoopReplica`."""


class LoopDeviceReplicas(_OutputsMixin, JaxMultiDeviceReplica):
    """See `insitu.train.custom_loop.MultiDeviceLoopReplica`."""
