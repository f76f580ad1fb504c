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

from insitu.train.backends import active_backend
from insitu.train.collectives import pack_leaves
from insitu.train.replica.combination import Operation
from insitu.train.replica.leaves import map_batch
from insitu.train.replica.loss_totals import NeedsTotals
from insitu.train.replica.metric_results import flatten_metrics
from insitu.train.replica.probe.decisions import are_close
from insitu.train.replica.probe.neutral import Chance
from insitu.train.replica.probe.outcome import Outcome, Steps, Totals
from insitu.train.replica.state import is_floating, read_state, regroup, to_numpy

Array = NDArray[np.float64]

TRAIN, TEST = "train_step", "test_step"
ZEROS, RESET, MOVED = "zeros", "reset", "moved"
"""The values in which metrics begin. RESET is what their reset_state() makes of them."""

_SHIFT = 0.125
"""Added to weights by an update, to see whether the step notices."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variable whose way to combine must be found out."""

    variable: Any
    """The variable."""
    default: Operation | None
    """Its operation if nothing is known: see `find_operation`."""
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
    """Outcome of the whole batch."""
    whole_after: Mapping[int, Array]
    """The values of candidates after the whole batch."""
    parts: Sequence[Outcome]
    """Outcome of each part."""
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
        self.steps: Steps = active_backend().make_probe_steps(self._model, self._trainable)
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
        starts = [None if totals is None else totals._replace(start=part.start) for part in PARTS]
        parts = zip((cut(rows, part) for part in PARTS), starts, strict=True)
        for batch, of_whole in ((rows, None), *parts):
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
        """Return True if a training step does other things if its update changes the weights, or changes
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
        # If a backend's step can't change weights, the shift is 0.
        uneven = [m for m in shifted if m.any() and not np.allclose(m, _SHIFT, atol=1e-3)]
        return not same or any(m.any() for m in moved) or bool(uneven)


def _moved(value: NDArray[Any], index: int, variable: Any) -> NDArray[Any]:
    """Return another value of the same kind."""
    if not is_floating(variable):
        return value if value.dtype.kind == "b" else (value + 3).astype(value.dtype)
    rng = np.random.default_rng([7, index])
    return (value + rng.uniform(0.5, 1.5, value.shape)).astype(value.dtype)


# Make rows like those of a model's data, the same in each process


WHOLE = 5
"""Rows of the whole batch."""
PARTS = (slice(0, 2), slice(2, 5))
"""The rows of its two parts, which differ in number."""
SAMPLE_ROWS = 64
"""Rows of the data that an example holds, if there are so many: some of them are probed too."""
_MARK = -1
"""The label that most often says that a row, or an entry of it, has none."""


def make_rows(example: Any, *, lowest: int) -> Any | None:
    """Return `WHOLE` rows like those of `example`, or None for data of other kinds than numbers.

    Floating values are in (0, 1), labels are 0 or 1, other integers `lowest` or one more. The parts differ in
    their means: a loss over the whole batch, such as a ratio of sums, gives the same if they are alike.
    """
    rng = np.random.default_rng(20_26)
    inputs = example[0] if isinstance(example, tuple) else example
    count = len(keras.tree.flatten(inputs))
    leaves = keras.tree.flatten(example)
    made = [_make(rng, leaf, lowest if index < count else 0) for index, leaf in enumerate(leaves)]
    if any(each is None for each in made):
        return None
    return pack_leaves(example, made)


def _make(rng: np.random.Generator, leaf: Any, lowest: int) -> Any:
    array = np.asarray(leaf)
    shape, kind = (WHOLE, *array.shape[1:]), array.dtype.kind
    if kind in "iu":
        return _skewed(rng.integers(0, 2, shape), lowest).astype(array.dtype)
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "f" or "float" in array.dtype.name:
        values = rng.uniform(0.05, 0.95, shape) / 2
        values[PARTS[1]] += 0.5
        return values.astype(array.dtype)
    return None


def _skewed(bits: Any, lowest: int) -> Any:
    """Return integers of 0 or 1, plus `lowest`, of which the first part has a 0 and the second a 1."""
    bits[PARTS[0].start], bits[PARTS[1].start] = 0, 1
    return bits + lowest


def take_rows(example: Any) -> Any | None:
    """Return `WHOLE` of the rows of `example`, or None if it has one row or shows nothing but zeros.

    They are far apart in their labels: the first part has the lowest, the second the highest. So the parts
    differ in what a loss leaves out by value.
    """
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(example) if leaf is not None]
    labels = [np.asarray(leaf) for leaf in keras.tree.flatten(_labels(example)) if leaf is not None]
    if not leaves or len(leaves[0]) < 2 or not any(_numbers(leaf).any() for leaf in labels):
        return None
    count = len(leaves[0])
    means = [_numbers(leaf).reshape(count, -1).mean(axis=1) for leaf in labels]
    order = np.argsort(np.sum(means, axis=0), kind="stable")
    picked = order[[0, count // 2, count // 4, 3 * count // 4, count - 1]]
    return map_batch(lambda leaf: np.asarray(leaf)[picked], example)


def mark_row(rows: Any) -> Any | None:
    """Return `rows` of which the first has no label, by the usual sign for it; None without labels."""
    if not isinstance(rows, tuple) or len(rows) < 2 or rows[1] is None:
        return None
    return (rows[0], map_batch(_mark_first, rows[1]), *rows[2:])


def turn_rows(rows: Any) -> Any:
    """Return made-up rows whose floating values, up to 4, are of both signs, by turns over rows and columns:
    code that goes by signs does something else in each part."""
    turned = map_batch(lambda leaf: _turn(leaf) if _is_float(leaf) else leaf, rows)
    # Weights of rows stay positive.
    return (*turned[:2], *rows[2:]) if isinstance(rows, tuple) else turned


def _turn(leaf: Any) -> Any:
    values = np.asarray(leaf).reshape(WHOLE, -1)
    signs = 1 - 2 * (np.add.outer(np.arange(WHOLE), np.arange(values.shape[1])) % 2)
    return (4 * signs * values).astype(leaf.dtype).reshape(leaf.shape)


def bring_labels_near(rows: Any, outputs: Sequence[Any]) -> Any | None:
    """Return `rows` whose labels are next to the model's outputs in the first part, and further from them in
    the second: a bound for the loss of a batch holds for one of them. None if labels are no such numbers."""
    labels = keras.tree.flatten(_labels(rows)) if isinstance(rows, tuple) and len(rows) > 1 else []
    if len(labels) != len(outputs) or not labels:
        return None
    if any(not _is_float(label) or label.shape != o.shape for label, o in zip(labels, outputs, strict=True)):
        return None
    errors = np.repeat([0.1, 1.0], [PARTS[0].stop, WHOLE - PARTS[0].stop])
    near = [o + errors.reshape(-1, *[1] * (o.ndim - 1)) for o in outputs]
    made = [value.astype(label.dtype) for value, label in zip(near, labels, strict=True)]
    return (rows[0], pack_leaves(rows[1], made), *rows[2:])


def _is_float(leaf: Any) -> bool:
    return bool(np.issubdtype(np.asarray(leaf).dtype, np.floating))


def _mark_first(leaf: Any) -> Any:
    marked = np.array(leaf)
    if marked.dtype.kind in "if":
        marked[0] = _MARK
    return marked


def _labels(example: Any) -> Any:
    return example[1] if isinstance(example, tuple) and len(example) > 1 else example


def _numbers(leaf: Any) -> Any:
    """Return an array in which what is no number is lower than all others."""
    return np.nan_to_num(leaf.astype(np.float64), nan=-1e9)


def cut(rows: Any, part: slice) -> Any:
    """Return some of the rows."""
    return map_batch(lambda leaf: leaf[part], rows)


def double(rows: Any) -> Any:
    """Return all rows twice."""
    return map_batch(lambda leaf: np.concatenate([leaf, leaf]), rows)


def make_value(variable: Any, index: int) -> Any:
    """Return a value for a variable in which each step begins that is probed: of positive numbers near 1, or
    for a matrix of both signs and about the size of usual initial values."""
    shape = tuple(variable.shape)
    rng = np.random.default_rng([20_26, index])
    if len(shape) < 2:
        return rng.uniform(0.25, 0.75, shape)
    fan_in = max(1, int(np.prod(shape[:-1])))
    return rng.uniform(-1, 1, shape) * np.sqrt(3.0 / fan_in)
