"""A call of one of Keras' methods: how it reaches a binding, and where it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from insitu.train.replica import Logs


class Called(Protocol):
    """What calls are handed to."""

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """A call of the method `name`."""


@dataclass(slots=True)
class Place:
    """Where a call is: the epoch, how many of its steps and of its test steps are done, and their last logs.

    `unchecked` counts steps since replicas were compared; `trained` is what the metrics held before the tests
    of the epoch began, by variable name.
    """

    epoch: int = 0
    steps: int = 0
    tests: int = 0
    unchecked: int = 0
    logs: Logs = field(default_factory=dict)
    test_logs: Logs = field(default_factory=dict)
    trained: dict[str, Any] = field(default_factory=dict)

    def begin(self, epoch: int, steps: int) -> None:
        """An epoch begins, in its middle where `steps` were done before."""
        if not steps:
            self.logs = {}
        self.epoch, self.steps, self.tests, self.test_logs, self.trained = epoch, steps, 0, {}, {}


def as_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Logs that a step may have left in the backend's own scalars."""
    return {name: float(value) for name, value in logs.items()}


def forward(binding: Called, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' method with its own signature, its arguments bound by name and handed to the binding."""
    signature = inspect.signature(original)

    def method(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return binding.call(name, dict(bound.arguments))

    method.__name__, method.__doc__ = name, original.__doc__
    return method


def spread(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of **kwargs beside the others."""
    named = {name: value for name, value in arguments.items() if name != "kwargs"}
    return {**named, **arguments.get("kwargs", {})}
