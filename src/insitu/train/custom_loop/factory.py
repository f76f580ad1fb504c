"""Make the replicas of a custom loop on the active Keras backend."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras

from insitu.train.custom_loop.loop_replica import LoopReplica
from insitu.train.custom_loop.step_model import StepModel


def trace_step(model: StepModel, example: list[Any]) -> list[Any]:
    """Run the step of `model` without effect on arrays like `example`, so that `model` knows the variables
    that it touches. Returns those of its metrics on which the outputs of the step depend."""
    found: list[Any] = _backend().trace_step(model, example)
    return found


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


def leave_graph(name: str) -> None:
    """Leave the graph that a function of the script is being compiled to, if any: what the public function
    `name` does can't be part of it. Called before anything is changed.

    Raises TrainingError if the function can't be run as Python instead.
    """
    _backend().leave_graph(name)


def prepare_backend() -> None:
    """Prepare TensorFlow's functions that scripts use around and in their steps. Done once. Other backends
    need nothing, and load nothing here."""
    if _is_tensorflow():
        from insitu.train.backends.tensorflow import tf_distribute, tf_function

        tf_distribute.install()
        tf_function.install()


def make_spec(shape: Sequence[int | None], dtype: str) -> Any:
    """Return what the backend describes an array by."""
    return _backend().make_spec(shape, dtype) if _is_tensorflow() else keras.KerasTensor(shape, dtype)


def make_trackable(data: type[Any]) -> type[Any]:
    """Return a class of positioned data of which the backend takes objects into its own checkpoints."""
    found: type[Any] = _backend().make_trackable(data) if _is_tensorflow() else data
    return found


def as_batch(leaf: Any) -> Any:
    """Return an array of a batch as scripts for the backend expect it: a tensor on TensorFlow."""
    return _backend().as_batch(leaf) if _is_tensorflow() else leaf


def out_of_range_error() -> Exception:
    """Return the error that iterators of the backend raise at their end."""
    error: Exception = _backend().out_of_range_error() if _is_tensorflow() else StopIteration()
    return error


def _is_tensorflow() -> bool:
    return str(keras.backend.backend()) == "tensorflow"


def _backend() -> Any:
    return importlib.import_module(f"insitu.train.backends.{keras.backend.backend()}.loop")
