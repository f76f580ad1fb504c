"""Custom loops on the JAX backend: the step becomes a pure function of the variables that it touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from insitu.train.custom_loop.loop_replica import OneCompiledGradient
from insitu.train.custom_loop.program import StepModel
from insitu.train.replica.jax import JaxReplica
from insitu.train.replicated.jax import JaxDevices


def learn(model: StepModel, example: list[Any]) -> None:
    """See `insitu.train.custom_loop.learn`."""
    jax.eval_shape(model.watch, [np.asarray(array) for array in example])


class _KeepingOutputs(OneCompiledGradient):
    """What the replicas below have in common."""

    _model: StepModel

    def start_gradient(self, shard: int, data: Any) -> Any:
        self._shard = shard
        return super().start_gradient(shard, data)  # type: ignore[misc]

    def _keep_outputs(self, *arguments: Any) -> Any:
        results, self.outputs[self._shard] = self._compiled(*arguments)
        return results

    def _trace_gradient(self, state: Any, offset: Any, leaves: Any) -> Any:
        results = super()._trace_gradient(state, offset, leaves)  # type: ignore[misc]
        return results, list(self._model.outputs)


class LoopReplica(_KeepingOutputs, JaxReplica):
    """See `insitu.train.custom_loop.LoopReplica`."""


class LoopDevices(_KeepingOutputs, JaxDevices):
    """See `insitu.train.custom_loop.ParallelLoopReplica`."""

    def __init__(
        self, model: StepModel, example: list[Any], devices: Sequence[Any], shards: Sequence[int], home: Any
    ) -> None:
        del shards  # parts say theirs
        super().__init__(model, example, devices, home or devices[0])
