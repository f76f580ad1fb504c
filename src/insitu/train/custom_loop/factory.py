"""Make the replicas of a custom loop on the active Keras backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.train.custom_loop.loop_replica import LoopReplica
from insitu.train.custom_loop.step_model import StepModel


def trace_step(model: StepModel, example: list[Any]) -> None:
    """Run the step of `model` without effect on arrays like `example`, so that `model` knows the variables
    that it touches."""
    _backend().trace_step(model, example)


def make_loop_replica(model: StepModel, example: list[Any]) -> LoopReplica:
    """Return a replica of `model`, which has been traced."""
    replica: LoopReplica = _backend().LoopReplica(model, example)
    return replica


def make_multi_device_loop_replica(
    model: StepModel, example: list[Any], devices: Sequence[Any], shards: Sequence[int], home: Any
) -> Any:
    """Return the replica of `model` on each of `devices`, one for each of `shards`. Each device has its own
    copy of the variables or, with a `home`, all read those on `home`. The result is a
    `MultiDeviceLoopReplica`, on TensorFlow also `LoopDeviceReplicas`."""
    return _backend().LoopDeviceReplicas(model, example, devices, shards, home)


def _backend() -> Any:
    import importlib

    import keras

    return importlib.import_module(f"insitu.train.custom_loop.{keras.backend.backend()}")
