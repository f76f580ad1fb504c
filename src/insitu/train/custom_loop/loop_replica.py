"""The replicas of a custom loop. They extend those of `fit` and keep the outputs of the user's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.train.custom_loop.step_model import StepModel
from insitu.train.replica import Replica
from insitu.train.replicated import DeviceReplicas, MultiDeviceReplica


class LoopReplica(Replica, Protocol):
    """`outputs[shard]` are the tensors that the step returned for that shard."""

    outputs: dict[int, list[Any]]


class MultiDeviceLoopReplica(LoopReplica, MultiDeviceReplica, Protocol):
    """Computes the gradients of all shards of a task at once."""


class LoopDeviceReplicas(DeviceReplicas, Protocol):
    """All replicas of the only process: `train` does a whole step, and fills `outputs` as a `LoopReplica`
    does."""

    outputs: dict[int, list[Any]]


class CompiledGradientMixin:
    """For replicas whose gradient is one compiled function. That function also returns the step's outputs;
    `_keep_outputs` takes them off before the replica sees the rest."""

    _gradient: Callable[..., Any]

    def __init__(self, model: StepModel, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)  # type: ignore[call-arg]
        self._without_gradient = model.without_gradient
        self.outputs: dict[int, list[Any]] = {}
        self._shard = 0
        self._compiled: Callable[..., Any] = self._gradient
        self._gradient = self._keep_outputs

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        self._shard = shard
        super().gradient(shard, data, floats, record)  # type: ignore[misc]

    def _keep_outputs(self, *arguments: Any) -> Any:
        raise NotImplementedError
