"""The steps of a strategy whose devices all belong to this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.train.elastic import Lockstep, Membership
from insitu.train.fit import TwoPhaseStep
from insitu.train.replica import Logs, Part, Replica


class Devices(Protocol):
    """All replicas of this process. A part for each; at least one has rows."""

    def train(self, parts: Sequence[Part]) -> Logs:
        """One update by the mean over the rows of all parts."""

    def test(self, parts: Sequence[Part]) -> Logs:
        """Adds the metrics of the parts to those of the model."""

    def predict_parts(self, parts: Sequence[Part]) -> list[Any]:
        """The outputs of each part, None for one without rows."""

    def predict(self, data: Any) -> Any:
        """The outputs for a batch, on one device."""

    def refresh(self, *, anyway: bool) -> None:
        """Gives all devices what has been assigned outside of steps."""


class ParallelReplica(Replica, Protocol):
    """A `Replica` that computes the gradients of all shards of a task at once."""

    def gradients(self, parts: Sequence[Part], floats: NDArray[Any], records: NDArray[np.float64]) -> None:
        """As `gradient` for each part, into the rows of `floats` and `records`."""


class DevicesStep:
    """A `StepExecutor` over the devices of the only process: nothing leaves them."""

    def __init__(self, devices: Devices, membership: Membership) -> None:
        self._devices = devices
        self._membership = membership
        self._fits = -1

    def _refresh(self) -> None:
        # At the beginning of each fit, because a user's own compiled function may have assigned something.
        fits = self._membership.fits
        self._devices.refresh(anyway=fits != self._fits)
        self._fits = fits

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        at("step")
        self._refresh()
        return self._devices.train(parts)

    def test(self, parts: Sequence[Part]) -> Logs:
        self._refresh()
        return self._devices.test(parts)

    def predict(self, parts: Sequence[Part], example: Any) -> Any:
        if not any(part.rows for part in parts):
            return keras.tree.map_structure(lambda leaf: leaf[:0], example)
        self._refresh()
        outputs = [output for output in self._devices.predict_parts(parts) if output is not None]
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)

    def example_output(self, data: Any) -> Any:
        return self._devices.predict(data)


class ParallelStep(TwoPhaseStep):
    """The two-phase step where the shards of this task have a device each: their gradients are computed at
    the same time. Evaluation and prediction take one after the other."""

    def __init__(self, replica: ParallelReplica, lockstep: Lockstep) -> None:
        super().__init__(replica, lockstep)
        self._parallel = replica

    def compute(self, parts: Sequence[Part], group: Group) -> None:
        floats = self._buffer(group)
        self._train_records[:] = 0
        if any(part.rows for part in parts):
            self._parallel.gradients(parts, floats, self._train_records)
