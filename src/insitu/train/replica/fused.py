"""The fused step of a replica without peers: one compiled function does it all, on the device.

A replica with peers runs two functions, with the exchange between them. A replica without peers needs neither
the second function nor a copy of its gradient. It runs the model's own `train_step`, bit for bit what Keras
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from insitu.train.replica.batch import ShardBatch
from insitu.train.replica.protocol import Logs


class FusedReplica(Protocol):
    """One copy of a model whose steps are each one call. Logs are numbers or scalars of the backend."""

    def train(self, data: Any) -> Logs:
        """Update the model once, by the batch `data`."""

    def test(self, data: Any) -> Logs:
        """Add the metrics of a batch to those of the model."""

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for a batch: a structure of NumPy arrays."""


class FusedStep:
    """A `StepExecutor` of one shard in one process."""

    def __init__(self, replica: FusedReplica) -> None:
        self._replica = replica

    def train(self, position: object, parts: Sequence[ShardBatch], report: Callable[[str], None]) -> Logs:
        report("step")
        return self._replica.train(parts[0].data)

    def test(self, position: object, parts: Sequence[ShardBatch]) -> Logs:
        return self._replica.test(parts[0].data)

    def predict(self, position: object, parts: Sequence[ShardBatch], example: Any) -> Any:
        if not parts[0].rows:
            return keras.tree.map_structure(lambda leaf: leaf[:0], example)
        return self._replica.predict(parts[0].data)

    def example_output(self, data: Any) -> Any:
        return self._replica.predict(data)
