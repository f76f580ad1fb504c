"""Custom loops on the JAX backend: the step becomes a pure function of the variables that it touches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from insitu.train.backends.jax import JaxReplica
from insitu.train.loops.backends import OneCompiledGradient
from insitu.train.loops.program import StepModel


def learn(model: StepModel, example: list[Any]) -> None:
    """See `insitu.train.loops.backends.learn`."""
    jax.eval_shape(model.watch, [np.asarray(array) for array in example])


class LoopReplica(OneCompiledGradient, JaxReplica):
    """See `insitu.train.loops.backends.LoopReplica`."""

    def _keep_outputs(self, *arguments: Any) -> Any:
        results, self.outputs[self._shard] = self._compiled(*arguments)
        return results

    def _trace_gradient(self, state: Any, offset: Any, leaves: Any) -> Any:
        return super()._trace_gradient(state, offset, leaves), list(self._model.outputs)
