"""A model's replicas on several JAX devices that read one copy of the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from insitu.train.backends.jax.replica import JaxReplica
from insitu.train.replica import CombinationPlan, ShardBatch


class JaxMultiDeviceReplica(JaxReplica):
    """Variables stay where they are; each step sends them to the devices, which compute at the same time."""

    def __init__(
        self,
        model: Any,
        data: Any,
        devices: Sequence[Any],
        home: Any,
        plan: CombinationPlan | None = None,
    ) -> None:
        super().__init__(model, data, plan)
        self._devices = tuple(devices)
        self._home = home

    def gradients(
        self, parts: Sequence[ShardBatch], floats: NDArray[Any], records: NDArray[np.float64]
    ) -> None:
        """See `MultiDeviceReplica`."""
        started = []
        for index, (device, part) in enumerate(zip(self._devices, parts, strict=True)):
            if part.rows:
                # A computation returns before it is done: all are under way before one is waited for.
                with jax.default_device(device):
                    started.append((index, self.start_gradient(part.shard, part.data)))
        for index, computation in started:
            self.finish_gradient(computation, floats[index], records[index])

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Any:
        with jax.default_device(self._home):
            return super().apply(floats, records)
