"""Makes the replicas of a custom loop on the active Keras backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.train.custom_loop.loop_replica import LoopReplica
from insitu.train.custom_loop.program import StepModel


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

    return importlib.import_module(f"insitu.train.custom_loop.{keras.backend.backend()}")
