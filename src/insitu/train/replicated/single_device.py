"""Run a step on a device that isn't the backend's first choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from insitu.train.devices import Device, default_device
from insitu.train.elastic import LoopPosition
from insitu.train.fit import StepExecutor
from insitu.train.replica import Logs, ShardBatch


def pin_step(step: StepExecutor, device: Device) -> StepExecutor:
    """Return `step` on `device`, or `step` itself if that is the backend's default."""
    return step if device == default_device() else PinnedStep(step, device.scope)


class PinnedStep:
    """Runs another `StepExecutor` inside a scope, which places all that it traces, makes or computes."""

    def __init__(self, step: StepExecutor, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self._step = step
        self._scope = scope

    @property
    def unpinned(self) -> StepExecutor:
        """The executor that it runs."""
        return self._step

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        with self._scope():
            return self._step.train(position, parts, report)

    def test(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> Logs:
        with self._scope():
            return self._step.test(position, parts)

    def predict(self, position: LoopPosition, parts: Sequence[ShardBatch], example: Any) -> Any:
        with self._scope():
            return self._step.predict(position, parts, example)

    def example_output(self, data: Any) -> Any:
        with self._scope():
            return self._step.example_output(data)
