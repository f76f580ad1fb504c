"""The replicas of a custom loop, one file per Keras backend: those of `fit`, which also keep what the user's
step returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.train.backends import Replica
from insitu.train.loops.program import StepModel
from insitu.train.spread.step import Devices, ParallelReplica


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


def learn(model: StepModel, example: list[Any]) -> None:
    """Runs the step of `model` without effect on arrays like `example`, so that `model` knows what it
    touches."""
    _backend().learn(model, example)


def make_loop_replica(model: StepModel, example: list[Any]) -> LoopReplica:
    """A replica of `model`, which has learnt what it touches."""
    replica: LoopReplica = _backend().LoopReplica(model, example)
    return replica


def make_loop_devices(
    model: StepModel, example: list[Any], devices: Sequence[Any], shards: Sequence[int], home: Any
) -> Any:
    """The replica of `model` on each of `devices`, one for each of `shards`, with copies of the variables or,
    where there is a `home`, those that lie there: a `ParallelLoopReplica`, on TensorFlow also
    `LoopDevices`."""
    return _backend().LoopDevices(model, example, devices, shards, home)


def _backend() -> Any:
    import importlib

    import keras

    return importlib.import_module(f"insitu.train.loops.backends.{keras.backend.backend()}")


__all__ = [
    "LoopDevices",
    "LoopReplica",
    "OneCompiledGradient",
    "ParallelLoopReplica",
    "learn",
    "make_loop_devices",
    "make_loop_replica",
]
