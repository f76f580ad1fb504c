"""Custom loops on the PyTorch backend: the step runs as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.backends.torch.replica import TorchReplica
from insitu.train.backends.torch.several_devices import TorchMultiDeviceReplica
from insitu.train.custom_loop import DeferredUpdates, StepModel


def leave_graph(name: str) -> None:
    """Raise TrainingError in a function that torch.compile compiles."""
    if torch.compiler.is_compiling():
        raise TrainingError(
            f"{name} moves values between tasks, outside of compiled functions. Received: a call in a "
            "function that torch.compile compiles. Compile the step instead, and give that to run()."
        )


def trace_step(model: StepModel, example: list[Any]) -> list[Any]:
    """See `Backend`."""
    arrays = [keras.ops.convert_to_tensor(np.array(array)) for array in example]
    before = _are_numbers(model.trace(arrays))
    # A value that depends on a metric is no number if the metric isn't.
    found = []
    for variable in model.metrics_variables if any(before) else ():
        if variable.value.is_floating_point():
            with keras.StatelessScope(state_mapping=[(variable, torch.full_like(variable.value, torch.nan))]):
                model.call(arrays, DeferredUpdates())
            if any(was and not now for was, now in zip(before, _are_numbers(model.outputs), strict=True)):
                found.append(variable)
    for variable in model.trainable_variables:
        variable.value.grad = None
    return found


def _are_numbers(outputs: Sequence[Any]) -> list[bool]:
    """Return for each tensor whether it is of floating numbers, none of which is NaN."""
    return [tensor.is_floating_point() and not bool(torch.isnan(tensor).any()) for tensor in outputs]


class LoopReplica(TorchReplica):
    """See `insitu.train.custom_loop.LoopReplica`."""

    def __init__(self, model: StepModel, *arguments: Any) -> None:
        self.outputs: dict[int, list[Any]] = {}
        super().__init__(model, *arguments)
        self._without_gradient = model.without_gradient

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        super().gradient(shard, data, floats, record)
        self.outputs[shard] = [tensor.detach() for tensor in self._model.outputs]


class LoopDeviceReplicas(LoopReplica, TorchMultiDeviceReplica):
    """See `insitu.train.custom_loop.MultiDeviceLoopReplica`."""

    def make_replica(self, model: Any, data: Any) -> TorchReplica:
        replica = LoopReplica(model, data)
        replica.outputs = self.outputs
        return replica
