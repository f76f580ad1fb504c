"""What one step of a probe gives, on any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.metric_results import flatten_logs
from insitu.train.replica.step_watch import StepWatch


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step has given to its optimizer, and returned."""

    gradients: Sequence[NDArray[np.float64]]
    """A gradient for each trainable variable, 0 where there is none. Empty for a test step."""
    logs: Mapping[str, NDArray[np.float64]]
    """The logs that are no results of metrics."""
    averaged: frozenset[int]
    """Ids of the variables of means that count each batch once."""
    scaled: bool = False
    """True if gradients were seen, and scaled, where they come from."""


class Steps(Protocol):
    """Runs the steps of a model by themselves, without an update. Variables that a step moves keep what it
    leaves in them."""

    def train(self, data: Any, *, factor: float = 1.0, shift: float = 0.0) -> Outcome:
        """Run a training step. Gradients are scaled by `factor` where they come from; `shift` is added to all
        trainable variables when the step updates them."""

    def test(self, data: Any) -> Outcome:
        """Run a test step."""

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        """Return the outputs of the model."""

    def close(self, *, chance_used: bool) -> None:
        """Leave the backend as it was. `chance_used` tells that the steps asked for random numbers."""


def read_logs(logs: Any, watch: StepWatch) -> dict[str, Any]:
    """Return the logs that are no results of metrics."""
    flat = flatten_logs(logs)
    return {"/".join(path): value for path, value in flat.items() if watch.results.find(value) is None}


def to_float64(value: Any) -> NDArray[np.float64]:
    """Return a tensor as a NumPy array."""
    if hasattr(value, "detach"):
        return np.asarray(value.detach().cpu().double().numpy())
    return np.asarray(keras.ops.cast(value, "float32") if _is_half(value) else value).astype(np.float64)


def _is_half(value: Any) -> bool:
    return "bfloat16" in str(getattr(value, "dtype", ""))
