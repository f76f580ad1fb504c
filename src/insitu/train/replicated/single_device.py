"""A step on a device that isn't the backend's first choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from insitu.train.devices import Device, default_device
from insitu.train.fit import StepExecutor
from insitu.train.replica import Logs, Part


def placed(step: StepExecutor, device: Device) -> StepExecutor:
    """`step` on `device`. Where the backend puts things anyway, nothing is entered in each step."""
    return step if device == default_device() else PlacedStep(step, device.scope)


class PlacedStep:
    """Runs another `StepExecutor` inside a scope, to which all that it traces, makes or computes belongs."""

    def __init__(self, step: StepExecutor, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self._step = step
        self._scope = scope

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        with self._scope():
            return self._step.train(parts, at)

    def test(self, parts: Sequence[Part]) -> Logs:
        with self._scope():
            return self._step.test(parts)

    def predict(self, parts: Sequence[Part], example: Any) -> Any:
        with self._scope():
            return self._step.predict(parts, example)

    def example_output(self, data: Any) -> Any:
        with self._scope():
            return self._step.example_output(data)
