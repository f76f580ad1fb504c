"""The replicas of a custom loop, one file per Keras backend: those of `fit`, which also keep what the user's
step returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.train.custom_loop.program import StepModel
from insitu.train.replica import Replica
from insitu.train.replicated import Devices, ParallelReplica


class LoopReplica(Replica, Protocol):
    """`outputs[shard]` are the tensors that the step returned for that shard."""

    outputs: dict[int, list[Any]]


class ParallelLoopReplica(LoopReplica, ParallelReplica, Protocol):
    """Computes what all shards of a task do at once."""


class LoopDevices(Devices, Protocol):
    """All replicas of the only process: `train` does a whole step, and fills `outputs` as a `LoopReplica`."""

    outputs: dict[int, list[Any]]


class OneCompiledGradient:
    """For replicas whose gradient is one compiled function, which then returns the step's outputs, too: they
    are taken off by `_keep_outputs`, before the replica sees the rest."""

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
