"""The outcome of one step of a probe, on any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.gradient_capture import capture_gradients
from insitu.train.replica.leaves import count_rows, map_batch
from insitu.train.replica.loss_totals import (
    BatchTotals,
    LossCounts,
    count_losses,
    demand_totals,
    divide_by_totals,
)
from insitu.train.replica.metric_results import flatten_logs
from insitu.train.replica.step_watch import StepWatch, watch_step
from insitu.train.replica.updated_weights import refuse_use_of_updated


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


class EagerSteps(Steps):
    """The `Steps` of a backend that runs them eagerly. What is left to it comes first."""

    def __init__(self, model: Any, trainable: Sequence[Any]) -> None:
        self._model = model
        self._trainable = trainable
        self.demands_totals = True

    def _to_tensor(self, leaf: Any) -> Any:
        raise NotImplementedError

    def _whole(self, gradient: Any) -> Any:
        """Return a gradient that may be of some rows as a tensor."""
        return gradient

    def _shift(self, shift: float) -> None:
        """Add `shift` to all trainable variables, in a way that Keras doesn't see."""
        raise NotImplementedError

    def _scaled_gradients(self, factor: float) -> AbstractContextManager[list[bool]]:
        """Return a scope that scales gradients where they come from. The list isn't empty once there was
        one."""
        raise NotImplementedError

    def _mode(self, *, training: bool, differentiates: bool) -> AbstractContextManager[Any]:
        """Return a scope for a step of that kind."""
        return nullcontext()

    def train(self, data: Any, *, totals: Totals = None, factor: float = 1.0, shift: float = 0.0) -> Outcome:
        model = self._model
        with (
            self._mode(training=True, differentiates=True),
            watch_step(model) as watch,
            losses_of(model, self, totals, data),
            capture_gradients(model.optimizer, partial(self._shift, shift) if shift else None) as captured,
            refuse_use_of_updated(model, captured.is_applied),
            self._scaled_gradients(factor) as seen,
        ):
            logs = read_logs(model.train_step(map_batch(self._to_tensor, data)), watch)
        gradients = [
            np.zeros(tuple(v.shape)) if g is None else to_float64(self._whole(g))
            for v, g in zip(self._trainable, captured.sort_for(self._trainable), strict=True)
        ]
        return make_outcome(gradients, logs, frozenset(watch.means.variables), bool(seen))

    def test(self, data: Any, *, totals: Totals = None) -> Outcome:
        model = self._model
        with (
            self._mode(training=False, differentiates=False),
            watch_step(model) as watch,
            losses_of(model, self, totals, data),
        ):
            logs = read_logs(model.test_step(map_batch(self._to_tensor, data)), watch)
        return make_outcome([], logs, frozenset(watch.means.variables))

    def count(self, data: Any, *, training: bool) -> Totals:
        model, batch = self._model, map_batch(self._to_tensor, data)
        with self._mode(training=training, differentiates=training), count_losses(model) as counts:
            if training:
                with capture_gradients(model.optimizer, trains=bool(self._trainable)):
                    model.train_step(batch)
            else:
                model.test_step(batch)
        return add_rows(data, counts)

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        x, options = split_inputs(self._model, map_batch(self._to_tensor, data), training)
        with self._mode(training=training, differentiates=False):
            return [to_float64(leaf) for leaf in keras.tree.flatten(self._model(x, **options))]


def make_outcome(
    gradients: Sequence[Any], logs: Mapping[str, Any], averaged: frozenset[int], scaled: bool = False
) -> Outcome:
    """Return the outcome of a step that returned tensors."""
    arrays = {name: to_float64(value) for name, value in logs.items()}
    return Outcome([to_float64(gradient) for gradient in gradients], arrays, averaged, scaled)


def add_rows(data: Any, counts: LossCounts) -> BatchTotals:
    """Return the totals of a batch of which the losses have counted this."""
    totals = np.array([count_rows(data), *map(float, counts.totals)], np.float32)
    return BatchTotals(totals, [each.detach() if hasattr(each, "detach") else each for each in counts.rows])


def split_inputs(model: Any, data: Any, training: bool) -> tuple[Any, dict[str, bool]]:
    """Return what a model is called with: its inputs, and options."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return x, {"training": training} if model._call_has_training_arg else {}


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
