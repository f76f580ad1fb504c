"""Run a model's steps from chosen values of its variables, and leave no trace of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.combination import Operation
from insitu.train.replica.loss_totals import NeedsTotals
from insitu.train.replica.metric_results import flatten_metrics
from insitu.train.replica.probe.decisions import are_close
from insitu.train.replica.probe.neutral import Chance
from insitu.train.replica.probe.outcome import Outcome, Steps, Totals
from insitu.train.replica.probe.synthetic_rows import PARTS, cut, make_value
from insitu.train.replica.state import is_floating, read_state, regroup, to_numpy

Array = NDArray[np.float64]

TRAIN, TEST = "train_step", "test_step"
ZEROS, RESET, MOVED = "zeros", "reset", "moved"
"""The values in which metrics begin. RESET is what their reset_state() makes of them."""

_SHIFT = 0.125
"""What an update adds to weights, to see whether the step notices."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variable of which it is to be found out how it combines."""

    variable: Any
    """The variable."""
    default: Operation | None
    """What happens to it if nothing is known: see `find_operation`."""
    metric: Any
    """The metric that it belongs to, or None."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """A step on the whole batch and on its parts, all from one state."""

    step: str
    """TRAIN or TEST."""
    metrics: str
    """The values in which metrics began."""
    weights_moved: bool
    """True if other state didn't begin in its own values."""
    before: Mapping[int, Array]
    """The values of candidates in which all began, by id."""
    whole: Outcome
    """What the whole batch gave."""
    whole_after: Mapping[int, Array]
    """The values of candidates after the whole batch."""
    parts: Sequence[Outcome]
    """What each part gave."""
    parts_after: Sequence[Mapping[int, Array]]
    """The values of candidates after each part."""


class Observer(AbstractContextManager["Observer"]):
    """While open, the model may be run and changed."""

    def __init__(self, model: Any, chance: Chance) -> None:
        self._model = model
        self._chance = chance
        state = regroup(read_state(model), {})
        # Those that are overwritten by their gradient, as scales of quantized layers are, keep the largest.
        self._trainable = tuple(
            v for v in state.trainable if not getattr(v, "overwrite_with_gradient", False)
        )
        self.candidates = [
            Candidate(variable, default, None)
            for variables, default in ((state.mean, Operation.MEAN), (state.first, Operation.FIRST))
            for variable in variables
            if variable.aggregation == "none"
        ]
        owners = {id(v): m for m in flatten_metrics(model.metrics) for v in getattr(m, "_variables", ())}
        for variables, default in ((state.sums, None), (state.metric_first, Operation.FIRST)):
            self.candidates += [
                Candidate(variable, default, owners.get(id(variable)))
                for variable in variables
                if variable.aggregation != "only_first_replica"
            ]
        optimizer = model.optimizer.variables if model.optimizer is not None else ()
        every = (*model.variables, *model.metrics_variables, *optimizer)
        self._saved = {id(v): (v, to_numpy(v)) for v in every}
        numbers = (int, float, bool)
        self._attributes = {name: value for name, value in vars(model).items() if isinstance(value, numbers)}

    def __enter__(self) -> Observer:
        self.steps: Steps = _make_steps(self._model, self._trainable)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.steps.close(chance_used=self._chance.used)
        self._model._clear_losses()
        for variable, value in self._saved.values():
            variable.assign(value)
        for name, number in self._attributes.items():
            object.__setattr__(self._model, name, number)

    def begin(self, *, own_weights: bool) -> None:
        """Give trainable variables values that are the same in each process, or else their own."""
        for variable, value in self._saved.values():
            variable.assign(value)
        for index, variable in enumerate(() if own_weights else self._trainable):
            variable.assign(make_value(variable, index).astype(to_numpy(variable).dtype))
        if hasattr(self._model.optimizer, "dynamic_scale"):
            self._model.optimizer.dynamic_scale.assign(1.0)  # so that no gradient of a probe overflows

    def set_state(self, metrics: str = ZEROS, *, weights_moved: bool = False) -> None:
        """Give metrics and other state the values in which a step begins."""
        if metrics == RESET:
            self._model.reset_metrics()
        for index, candidate in enumerate(self.candidates):
            variable, own = candidate.variable, self._saved[id(candidate.variable)][1]
            if candidate.metric is None:
                variable.assign(_moved(own, index, variable) if weights_moved else own)
            elif metrics != RESET:
                zeros = np.zeros_like(own)
                variable.assign(_moved(zeros, index, variable) if metrics == MOVED else zeros)

    def run_once(self, step: str, rows: Any, totals: Totals = None, **options: float) -> Outcome:
        """Run a step as it is after `set_state`."""
        if step == TRAIN:
            return self.steps.train(rows, totals=totals, **options)
        return self.steps.test(rows, totals=totals)

    def _find_totals(self, step: str, rows: Any) -> Totals:
        """Return what losses on the parts of `rows` divide by; None if they need none."""
        self.set_state()
        if self.steps.demands_totals:
            try:
                self.run_once(step, rows)
                return None
            except NeedsTotals:
                self.steps.demands_totals = False
                self.set_state()
        return self.steps.count(rows, training=step == TRAIN)

    def run(self, step: str, rows: Any, metrics: str = ZEROS, *, weights_moved: bool = False) -> StateRun:
        """Run a step on `rows` and on their parts."""
        outcomes, after = [], []
        before: Mapping[int, Array] = {}
        totals = self._find_totals(step, rows)
        for batch, of_whole in ((rows, None), *((cut(rows, part), totals) for part in PARTS)):
            self.set_state(metrics, weights_moved=weights_moved)
            before = self.values()
            outcomes.append(self.run_once(step, batch, of_whole))
            after.append(self.values())
        return StateRun(
            step, metrics, weights_moved, before, outcomes[0], after[0], tuple(outcomes[1:]), tuple(after[1:])
        )

    def run_nudged(self, rows: Any, size: float) -> Outcome:
        """Run a training step with weights that are changed by up to `size` of themselves."""
        self.set_state()
        before = [(variable, to_numpy(variable)) for variable in self._trainable]
        for index, (variable, value) in enumerate(before):
            nudge = np.random.default_rng([11, index]).uniform(-size, size, value.shape)
            variable.assign((value * (1 + nudge)).astype(value.dtype))
        try:
            return self.run_once(TRAIN, rows)
        finally:
            for variable, value in before:
                variable.assign(value)

    def values(self) -> dict[int, Array]:
        """Return the values of all candidates, by id."""
        return {id(c.variable): to_numpy(c.variable).astype(np.float64) for c in self.candidates}

    def metrics_start_elsewhere(self) -> bool:
        """Return True if some metric is reset to other values than 0."""
        self.set_state(RESET)
        return any(to_numpy(c.variable).any() for c in self.candidates if c.metric is not None)

    def sees_updates(self, rows: Any, tolerance: float) -> bool:
        """Return True if a training step does other things where its update changes the weights, or changes
        weights by itself."""
        results = []
        for shift in (0.0, _SHIFT):
            self.set_state()
            before = [to_numpy(v).astype(np.float64) for v in self._trainable]
            outcome = self.steps.train(rows, shift=shift)
            after = [to_numpy(v).astype(np.float64) for v in self._trainable]
            moved = [a - b for a, b in zip(after, before, strict=True)]
            results.append((outcome.logs, self.values(), moved))
            for variable, value in zip(self._trainable, before, strict=True):
                variable.assign(value.astype(to_numpy(variable).dtype))
        (logs, values, moved), (shifted_logs, shifted_values, shifted) = results
        same = all(are_close(logs[n], shifted_logs[n], tolerance) for n in logs if n in shifted_logs)
        same &= all(are_close(values[key], shifted_values[key], tolerance) for key in values)
        # Where a backend's step can't change weights, the shift is 0.
        uneven = [m for m in shifted if m.any() and not np.allclose(m, _SHIFT, atol=1e-3)]
        return not same or any(m.any() for m in moved) or bool(uneven)


def _moved(value: NDArray[Any], index: int, variable: Any) -> NDArray[Any]:
    """Return another value of the same kind."""
    if not is_floating(variable):
        return value if value.dtype.kind == "b" else (value + 3).astype(value.dtype)
    rng = np.random.default_rng([7, index])
    return (value + rng.uniform(0.5, 1.5, value.shape)).astype(value.dtype)


def _make_steps(model: Any, trainable: Any) -> Steps:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from insitu.train.replica.probe.tensorflow import TensorFlowSteps

        return TensorFlowSteps(model, trainable)
    if backend == "jax":
        from insitu.train.replica.probe.jax import JaxSteps

        return JaxSteps(model, trainable)
    from insitu.train.replica.probe.torch import TorchSteps

    return TorchSteps(model, trainable)
