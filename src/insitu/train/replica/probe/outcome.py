"""The outcome of one step of a probe, on any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.leaves import count_rows
from insitu.train.replica.loss_totals import BatchTotals, demand_totals, divide_by_totals
from insitu.train.replica.metric_results import flatten_logs
from insitu.train.replica.step_watch import StepWatch


@dataclass(frozen=True, slots=True)
class Outcome:
    """Values that a step has given to its optimizer, and returned."""

    gradients: Sequence[NDArray[np.float64]]
    """A gradient for each trainable variable, 0 if there is none. Empty for a test step."""
    logs: Mapping[str, NDArray[np.float64]]
    """The logs that are no results of metrics."""
    averaged: frozenset[int]
    """Ids of the variables of means that count each batch once."""
    scaled: bool = False
    """True if gradients were seen, and scaled, where they come from."""


Totals = BatchTotals | None
"""The totals of the batch of which the rows of a step are a part; None for a whole batch."""


class Steps(Protocol):
    """Runs the steps of a model by themselves, without an update. Variables that a step moves keep what it
    leaves in them."""

    #: Whether losses that need totals raise NeedsTotals, as long as a step has none.
    demands_totals: bool

    def train(self, data: Any, *, totals: Totals = None, factor: float = 1.0, shift: float = 0.0) -> Outcome:
        """Run a training step. Gradients are scaled by `factor` where they come from; `shift` is added to all
        trainable variables when the step updates them."""

    def test(self, data: Any, *, totals: Totals = None) -> Outcome:
        """Run a test step."""

    def count(self, data: Any, *, training: bool) -> Totals:
        """Return the totals of a batch."""

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        """Return the outputs of the model."""

    def close(self, *, chance_used: bool) -> None:
        """Leave the backend as it was. `chance_used` says that the steps asked for random numbers."""


def losses_of(model: Any, steps: Steps, totals: Any, data: Any) -> AbstractContextManager[None]:
    """Return a scope in which losses divide as in a step on `data`. `totals` may be traced."""
    if totals is not None:
        return divide_by_totals(model, totals, count_rows(data))
    return demand_totals(model) if steps.demands_totals else nullcontext()


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
