"""A step is pinned to a device only where that isn't the backend's own choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from insitu.train.devices.names import default_device
from insitu.train.elastic import CUSTOM_LOOP
from insitu.train.replicated.single_device import PinnedStep, pin_step


class Step:
    def __init__(self, opened: list[str]) -> None:
        self._opened = opened

    def train(self, position: Any, parts: Any, report: Any) -> dict[str, float]:
        return {"open": len(self._opened)}

    def test(self, position: Any, parts: Any) -> dict[str, float]:
        return {"open": len(self._opened)}

    def predict(self, position: Any, parts: Any, example: Any) -> int:
        return len(self._opened)

    def example_output(self, data: Any) -> int:
        return len(self._opened)


def test_each_call_runs_inside_the_scope() -> None:
    opened: list[str] = []

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        opened.append("device")
        yield
        opened.pop()

    step: Any = Step(opened)
    pinned = PinnedStep(step, scope)
    assert pinned.train(CUSTOM_LOOP, (), print) == pinned.test(CUSTOM_LOOP, ()) == {"open": 1}
    assert pinned.predict(CUSTOM_LOOP, (), None) == pinned.example_output(None) == 1
    assert not opened
    assert pin_step(step, default_device()) is step
