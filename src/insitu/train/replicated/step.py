"""The steps of a strategy whose devices all belong to this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.train.elastic import Lockstep, LoopPosition, Membership
from insitu.train.fit import TwoPhaseStep
from insitu.train.replica import Logs, Replica, ShardBatch


class DeviceReplicas(Protocol):
    """All replicas of this process. Each call takes a part for each; at least one has rows."""

    def train(self, parts: Sequence[ShardBatch]) -> Logs:
        """Update once, by the mean over the rows of all parts."""

    def test(self, parts: Sequence[ShardBatch]) -> Logs:
        """Add the metrics of the parts to those of the model."""

    def predict_parts(self, parts: Sequence[ShardBatch]) -> list[Any]:
        """Return the outputs of each part, None for one without rows."""

    def predict(self, data: Any) -> Any:
        """Return the outputs for a batch, computed on one device."""

    def run_with_seeds_of(self, shard: int, run: Callable[[], Any]) -> tuple[Any, Any]:
        """See `Replica`."""

    def keep_gradients(self) -> None:
        """Keep the mean gradient of each step from now on."""

    def read_gradients(self) -> dict[str, NDArray[Any]]:
        """Return that of the last step, by the path of the variable; nothing before it."""

    def refresh(self, *, force: bool) -> None:
        """Copy assignments from outside of steps to all devices, if there were any or with `force`."""


class MultiDeviceReplica(Replica, Protocol):
    """A `Replica` that computes the gradients of all shards of a task at once."""

    def gradients(
        self, parts: Sequence[ShardBatch], floats: NDArray[Any], records: NDArray[np.float64]
    ) -> None:
        """Do as `gradient` for each part, into the rows of `floats` and `records`."""


class SingleProcessStep:
    """A `StepExecutor` over the devices of the only process, with no exchange."""

    def __init__(self, devices: DeviceReplicas, membership: Membership) -> None:
        self._devices = devices
        self._membership = membership
        self._fits = -1

    def _refresh(self) -> None:
        # At the beginning of each fit, because a user's own compiled function may have assigned something.
        fits = self._membership.fits
        self._devices.refresh(force=fits != self._fits)
        self._fits = fits

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        report("step")
        self._refresh()
        return self._devices.train(parts)

    def keep_gradients(self) -> None:
        """Keep the mean gradient of each step from now on."""
        self._devices.keep_gradients()

    def read_gradients(self) -> dict[str, NDArray[Any]]:
        """Return that of the last step, by the path of the variable; nothing before it."""
        return self._devices.read_gradients()

    def test(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> Logs:
        self._refresh()
        return self._devices.test(parts)

    def predict(self, position: LoopPosition, parts: Sequence[ShardBatch], example: Any) -> Any:
        if not any(part.rows for part in parts):
            return keras.tree.map_structure(lambda leaf: leaf[:0], example)
        self._refresh()
        outputs = [output for output in self._devices.predict_parts(parts) if output is not None]
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)

    def example_output(self, data: Any) -> Any:
        return self._devices.run_with_seeds_of(0, lambda: self._devices.predict(data))[0]


class MultiDeviceStep(TwoPhaseStep):
    """The two-phase step of a task whose shards have a device each: their gradients are computed at the same
    time. Evaluation and prediction take one shard after the other."""

    def __init__(self, replica: MultiDeviceReplica, lockstep: Lockstep) -> None:
        super().__init__(replica, lockstep)
        self._parallel = replica

    def compute(self, parts: Sequence[ShardBatch], group: Group) -> None:
        floats = self._buffer(group)
        self._train_records[:] = 0
        if any(part.rows for part in parts):
            self._parallel.gradients(parts, floats, self._train_records)
