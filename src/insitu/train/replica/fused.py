"""The step of a replica that is alone: one compiled function does it all, and nothing leaves the device.

A replica with peers takes two functions, with the exchange between them. One that has no peers needs neither
the second nor a copy of its gradient: what runs is the model's own `train_step`, bit for bit what Keras runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from insitu.train.replica.batch import Part
from insitu.train.replica.protocol import Logs


class FusedReplica(Protocol):
    """One copy of a model whose steps are each one call. Logs are numbers or scalars of the backend."""

    def train(self, data: Any) -> Logs:
        """One update of the model from the batch `data`."""

    def test(self, data: Any) -> Logs:
        """Adds the metrics of a batch to those of the model."""

    def predict(self, data: Any) -> Any:
        """The model's outputs for a batch: a structure of NumPy arrays."""


class FusedStep:
    """A `StepExecutor` of one shard in one process."""

    def __init__(self, replica: FusedReplica) -> None:
        self._replica = replica

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        at("step")
        return self._replica.train(parts[0].data)

    def test(self, parts: Sequence[Part]) -> Logs:
        return self._replica.test(parts[0].data)

    def predict(self, parts: Sequence[Part], example: Any) -> Any:
        if not parts[0].rows:
            return keras.tree.map_structure(lambda leaf: leaf[:0], example)
        return self._replica.predict(parts[0].data)

    def example_output(self, data: Any) -> Any:
        return self._replica.predict(data)


def make_fused_replica(model: Any, data: Any) -> FusedReplica:
    """A replica of `model` on the active Keras backend. `data` is a batch, for its structure and dtypes."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from insitu.train.replica.fused_tensorflow import FusedTensorFlow

        return FusedTensorFlow(model, data)
    if backend == "jax":
        from insitu.train.replica.fused_jax import FusedJax

        return FusedJax(model, data)
    from insitu.train.replica.fused_torch import FusedTorch

    return FusedTorch(model, data)
