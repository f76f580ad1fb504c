"""Custom loops on the JAX backend: the step becomes a pure function of the variables that it touches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from insitu.train.backends.jax import JaxReplica
from insitu.train.loops.program import StepModel


def learn(model: StepModel, example: list[Any]) -> None:
    """See `insitu.train.loops.backends.learn`."""
    jax.eval_shape(model.watch, [np.asarray(array) for array in example])


class LoopReplica(JaxReplica):
    """See `insitu.train.loops.backends.LoopReplica`."""

    def __init__(self, model: StepModel, example: list[Any]) -> None:
        super().__init__(model, example)
        self._without_gradient = model.without_gradient
        self.outputs: dict[int, list[Any]] = {}
        self._shard = 0
        self._compiled = self._gradient
        self._gradient = self._keep_outputs

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        self._shard = shard
        super().gradient(shard, data, floats, record)

    def _keep_outputs(self, *arguments: Any) -> Any:
        results, self.outputs[self._shard] = self._compiled(*arguments)
        return results

    def _trace_gradient(self, state: Any, offset: Any, leaves: Any) -> Any:
        return super()._trace_gradient(state, offset, leaves), list(self._model.outputs)
