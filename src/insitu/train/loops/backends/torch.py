"""Custom loops on the PyTorch backend: the step runs as it is written."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.backends.torch import TorchReplica
from insitu.train.loops.program import StepModel


def learn(model: StepModel, example: list[Any]) -> None:
    """See `insitu.train.loops.backends.learn`."""
    model.watch([keras.ops.convert_to_tensor(np.array(array)) for array in example])
    for variable in model.trainable_variables:
        variable.value.grad = None


class LoopReplica(TorchReplica):
    """See `insitu.train.loops.backends.LoopReplica`."""

    def __init__(self, model: StepModel, example: list[Any]) -> None:
        super().__init__(model, example)
        self._without_gradient = model.without_gradient
        self.outputs: dict[int, list[Any]] = {}

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        super().gradient(shard, data, floats, record)
        self.outputs[shard] = [tensor.detach() for tensor in self._model.outputs]
