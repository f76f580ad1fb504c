"""Run a model's steps on a few rows, and plan how they combine."""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.backends import active_backend
from insitu.train.replica.batch_losses import GLOBAL, REPLICA, find_global_step, find_rows
from insitu.train.replica.combination import Operation, combine
from insitu.train.replica.metric_results import flatten_metrics
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.probe import refusals
from insitu.train.replica.probe.decisions import (
    FACTORS,
    Gradients,
    Movement,
    are_close,
    are_finite,
    are_rounding,
    find_differences,
    find_operation,
    is_linear,
    largest_difference,
    mean_by_rows,
)
from insitu.train.replica.probe.neutral import without_chance
from insitu.train.replica.probe.observer import (
    MOVED,
    PARTS,
    RESET,
    TEST,
    TRAIN,
    WHOLE,
    ZEROS,
    Candidate,
    Observer,
    StateRun,
    bring_labels_near,
    cut,
    double,
    make_rows,
    mark_row,
    take_rows,
    turn_rows,
)
from insitu.train.replica.probe.outcome import Outcome
from insitu.train.replica.state import check_trainable_by_shards, read_losses

SHARES = np.array([(part.stop - part.start) / WHOLE for part in PARTS])
_NUDGES = (1e-6, 4e-3)
"""Rounding errors of weights, relative to them: in single precision, and in half precision."""
_log = logging.getLogger(__name__)


def plan_combination(
    model: Any, example: Any, num_shards: int, *, weights_on_servers: bool = False
) -> CombinationPlan:
    """Return how the steps of `model`, built, combine over shards on batches like `example`. Leaves the model
    as it is.

    Steps that can't run in a probe are planned as for models of Keras' own parts, and the plan says so. With
    `weights_on_servers` no state but metrics can combine by an operation.

    Raises:
        TrainingError: if it is known without a probe that training can't be combined.
    """
    check_trainable_by_shards(model, num_shards, exchanges_totals=not weights_on_servers)
    # How a step of the user's own uses scaled losses isn't known.
    exponent = 0 if has_own_train_step(model) else (num_shards - 1).bit_length()
    synchronized = find_synchronized(model) if num_shards > 1 else None
    if synchronized is not None:
        return CombinationPlan(train_refusal=refusals.of_synchronized(synchronized))
    refusal = _refuse_global(model, weights_on_servers=weights_on_servers) if num_shards > 1 else None
    if refusal is not None:
        return CombinationPlan(train_refusal=refusal, test_refusal=refusal)
    if num_shards == 1 or not is_built_to_train(model) or not has_custom_parts(model):
        return CombinationPlan(loss_exponent=exponent)
    kept = read_kept(model)
    with without_chance() as chance, Observer(model, chance) as observer:
        probe = _Probe(model, example, observer)
        try:
            plan = probe.plan()
        except Exception as error:  # of the user's code; if it comes from more than the rows, it comes again
            plan = CombinationPlan()
            probe.unchecked.append(refusals.of_failed_step("A step", error))
        others = [c.variable for c in observer.candidates if c.metric is None]
    odd = [variable.path for variable in others if id(variable) in plan.operations]
    if weights_on_servers and odd:
        plan = replace(plan, train_refusal=refusals.of_server_weight(odd[0]))
    number = _number_of(plan, [*model.variables, *model.metrics_variables])
    unchecked = tuple(dict.fromkeys(probe.unchecked))
    effects = find_changed(kept, read_kept(model))
    return replace(plan, unchecked=unchecked, effects=effects, number=number, loss_exponent=exponent)


def _refuse_global(model: Any, *, weights_on_servers: bool) -> str | None:
    """Return why a loss can't be over the rows of the global batch."""
    if find_rows(model) != GLOBAL:
        return None
    step = find_global_step(model)
    return refusals.GLOBAL_ROWS_ON_SERVERS if weights_on_servers else step and refusals.of_global_step(step)


def _number_of(plan: CombinationPlan, variables: Sequence[Any]) -> int:
    operations = [plan.operations.get(id(variable)) for variable in variables]
    said = [str(each) for each in operations], plan.train_refusal is None, plan.test_refusal is None
    return zlib.crc32(repr(said).encode())


class _Probe:
    def __init__(self, model: Any, example: Any, observer: Observer) -> None:
        self._model = model
        self._example = example
        self._observer = observer
        #: The rows that the steps run on. Written by `_run_first`.
        self._rows: Any = None
        #: Part of the largest value: differences up to this are rounding.
        self._tolerance = 5e-2 if _computes_in_halves(model) else 1e-3
        self._has_own_numbers = has_own_numbers(model)
        #: Whether each replica's loss must be over its own rows, which differs from that of the whole batch.
        self._takes_own_rows = find_rows(model) == REPLICA
        #: Facts that could not be found out. Written by all that gives up.
        self.unchecked: list[str] = []

    def plan(self) -> CombinationPlan:
        first = self._run_first(TRAIN)
        others = self._run_others(first) if first is not None else []
        refusal = self._check_gradient(first) if first is not None else None
        refusal = refusal or self._check_others(others)
        if refusal is not None:
            return CombinationPlan(train_refusal=refusal)
        runs = [first, *self._run_more(first), *(run for run, _ in others)] if first is not None else []
        first = self._run_first(TEST) if self._has_own_numbers else None
        if first is not None:
            runs += [first, *self._run_more(first), *(run for run, _ in self._run_others(first))]
        findings = self._find(runs)
        for step in list(findings.refusals):
            if step in findings.refusals and self._is_excused(step, findings.unexplained[step]):
                runs = [run for run in runs if run.step != step]
                findings = self._find(runs)
        by_step = findings.refusals
        return CombinationPlan(findings.operations, by_step.get(TRAIN), by_step.get(TEST))

    def _find(self, runs: list[StateRun]) -> Findings:
        kept = [c for c in self._observer.candidates if c.metric is None or self._has_own_numbers]
        return find_all(kept, runs, SHARES, self._tolerance)

    def _run_first(self, step: str) -> StateRun | None:
        """Run a step with rows, and weights, with which it gives numbers. Returns None if it fails with all:
        then the user's own rows may show why."""
        if step == TRAIN and self._model.optimizer is None:
            return None
        reason = refusals.NOT_FINITE
        # A metric may give no number on any made-up rows; those on which all is a number show more.
        for is_accepted in (_is_finite, _has_finite_gradients):
            for own_weights, lowest in itertools.product(
                (False, True), (0,) if active_backend().loses_device_by_bad_index() else (1, 0)
            ):
                self._rows = make_rows(self._example, lowest=lowest)
                if self._rows is None:
                    self.unchecked.append(refusals.NO_NUMBERS)
                    return None
                self._observer.begin(own_weights=own_weights)
                try:
                    run = self._observer.run(step, self._rows)
                except TrainingError as error:  # when the step is compiled it comes again
                    _log.debug("%s can't be combined: %s", step, error)
                    return None
                except Exception as error:
                    reason = refusals.of_failed_step(step, error)
                    continue
                if is_accepted(run):
                    return run
        self.unchecked.append(reason)
        return None

    def _run_more(self, first: StateRun) -> list[StateRun]:
        """Run a step from other states, as far as these show more."""
        starts = [MOVED] if self._has_own_numbers else []
        if self._has_own_numbers and self._observer.metrics_start_elsewhere():
            starts.append(RESET)
        runs = [self._observer.run(first.step, self._rows, start) for start in starts]
        weights = {id(c.variable) for c in self._observer.candidates if c.metric is None}
        if any(not np.array_equal(first.before[key], first.whole_after[key]) for key in weights):
            runs.append(self._observer.run(first.step, self._rows, weights_moved=True))
        return runs

    def _run_others(self, first: StateRun) -> list[tuple[StateRun, Any]]:
        """Run a step with rows on which code that goes by values does other things, such as leave out labels
        of -1 or negative values, or bound the loss. Returns runs and their rows, without those on which the
        step fails."""
        done = []
        training = first.step == TRAIN
        makers: list[Callable[[], Any]] = [
            lambda: take_rows(self._example),
            lambda: mark_row(self._rows),
            lambda: turn_rows(self._rows),
        ]
        if any(not _is_loss_of_keras(loss) for loss in read_losses(self._model)):
            makers.append(lambda: bring_labels_near(self._rows, self._forward(self._rows, training)))
        for make in makers:
            try:
                rows = make()
                run = self._observer.run(first.step, rows) if rows is not None else None
            except Exception as error:  # such as a label that the model has no class for
                _log.debug("%s fails on other rows: %s", first.step, error)
                continue
            if run is not None and _is_finite(run):
                done.append((run, rows))
        return done

    def _is_excused(self, step: str, names: Sequence[str] = ()) -> bool:
        """Return True if a step can't be judged: rows are coupled by the model itself, when each replica
        takes its own, or random numbers continue that Keras doesn't know of. `names` are of what differs;
        none if gradients do."""
        if self._takes_own_rows:
            return True
        if self._couples_rows(training=step == TRAIN):
            self.unchecked.append(refusals.of_coupled_outputs(names))
        elif self._is_fixed(step):
            return False
        return True

    # Gradients

    def _check_gradient(self, run: StateRun) -> str | None:
        """Return why gradients can't be combined."""
        if has_own_train_step(self._model):
            sees_updates = self._observer.sees_updates(self._rows, self._tolerance)
            if sees_updates and self._is_fixed(TRAIN):
                return refusals.READS_UPDATED
            if not self._is_linear():
                return refusals.NOT_LINEAR
        return self._check_mean(run)

    def _check_others(self, others: Sequence[tuple[StateRun, Any]]) -> str | None:
        """Return why gradients of other rows can't be combined."""
        rows = self._rows
        try:
            for run, self._rows in others:
                refusal = self._check_mean(run)
                if refusal is not None:
                    return refusal
        finally:
            self._rows = rows
        return None

    def _check_mean(self, run: StateRun) -> str | None:
        """Return why the gradients of `run` on `_rows` are no mean over rows."""
        whole, parts = run.whole.gradients, [part.gradients for part in run.parts]
        difference = largest_difference(whole, mean_by_rows(parts, SHARES))
        if difference > self._tolerance and not self._is_excused(TRAIN):
            if self._is_rounding(whole, mean_by_rows(parts, SHARES)):
                self.unchecked.append(refusals.ROUNDING)
                return None
            if self._is_sum(whole, parts):
                return refusals.SUMS
            return refusals.of_coupled_rows(difference)
        return None

    def _train(self, rows: Any, **options: float) -> Outcome:
        self._observer.set_state()
        return self._observer.run_once(TRAIN, rows, None, **options)

    def _is_rounding(self, whole: Gradients, mean: Gradients) -> bool:
        """Return True if gradients differ by rounding only, as when they would be 0."""
        nudged = self._observer.run_nudged(self._rows, _NUDGES[_computes_in_halves(self._model)])
        after_nudge = find_differences(whole, nudged.gradients)
        return are_rounding(find_differences(whole, mean), after_nudge, self._tolerance)

    def _is_sum(self, whole: Gradients, parts: Sequence[Gradients]) -> bool:
        """Return True if the gradient is a mean, plus a sum over rows, which doubles with the rows."""
        doubled = [self._train(double(cut(self._rows, part))).gradients for part in PARTS]
        pairs = [list(zip(d, p, strict=True)) for d, p in zip(doubled, parts, strict=True)]
        sums = [[twice - once for twice, once in each] for each in pairs]
        means = [[2 * once - twice for twice, once in each] for each in pairs]
        added = [np.sum(each, axis=0) for each in zip(*sums, strict=True)]
        combined = [m + s for m, s in zip(mean_by_rows(means, SHARES), added, strict=True)]
        return largest_difference(whole, combined) <= 10 * self._tolerance

    def _is_linear(self) -> bool:
        """Return True if a train_step only scales and adds up gradients, as far as this can be seen."""
        if self._tolerance > 1e-2:
            return True
        scaled = [self._train(self._rows, factor=factor) for factor in FACTORS]
        if not all(each.scaled and are_finite(each.gradients) for each in scaled):
            self.unchecked.append(refusals.NOT_SCALED)
            return True
        gradients = [each.gradients for each in scaled]
        return is_linear(gradients, 10 * self._tolerance) or not self._is_fixed(TRAIN)

    # Conditions under which a probe shows nothing

    def _is_fixed(self, step: str) -> bool:
        """Return True if a step gives the same again."""
        if self._gives_the_same(step):
            return True
        self.unchecked.append(refusals.of_randomness(step))
        return False

    def _gives_the_same(self, step: str) -> bool:
        results = []
        for _ in range(2):
            self._observer.set_state()
            outcome = self._observer.run_once(step, self._rows)
            results.append((outcome, self._observer.values()))
        (one, values), (other, others) = results
        return (
            largest_difference(one.gradients, other.gradients) <= self._tolerance
            and all(are_close(values[key], others[key], self._tolerance) for key in values)
            and all(are_close(one.logs[n], other.logs[n], self._tolerance) for n in one.logs)
        )

    def _couples_rows(self, *, training: bool) -> bool:
        """Return True if the model's outputs for a row depend on other rows."""
        try:
            whole = self._forward(self._rows, training)
            parts = [self._forward(cut(self._rows, part), training) for part in PARTS]
        except Exception as error:
            _log.debug("outputs can't be probed: %s", error)
            return False
        pairs = [leaves for leaves in zip(whole, *parts, strict=True) if leaves[0].ndim]
        if any(part.shape[1:] != one.shape[1:] for one, *leaves in pairs for part in leaves):
            return False  # These are no outputs for rows, but for pairs of them, which a loss goes over.
        return any(not self._are_rows_of(one, leaves) for one, *leaves in pairs)

    def _forward(self, rows: Any, training: bool) -> list[Any]:
        # Begin in the same state each time: a layer may read what it has moved in the call before.
        self._observer.set_state()
        return self._observer.steps.forward(rows, training=training)

    def _are_rows_of(self, whole: Any, parts: Sequence[Any]) -> bool:
        """Return True if the rows of `whole` are those of `parts`."""
        rows = np.concatenate(parts)
        return rows.shape == whole.shape and are_close(rows, whole, self._tolerance)


def _has_finite_gradients(run: StateRun) -> bool:
    return all(are_finite(each.gradients) for each in (run.whole, *run.parts))


def _is_finite(run: StateRun) -> bool:
    """Return True if a step on the whole batch gives numbers."""
    after, logs = run.whole_after.values(), run.whole.logs.values()
    return are_finite(run.whole.gradients) and all(np.isfinite(each).all() for each in (*after, *logs))


def _computes_in_halves(model: Any) -> bool:
    return any("16" in str(getattr(layer, "compute_dtype", "")) for layer in model._flatten_layers())


# Find out whether code of the user's keeps something in Python of the rows that a probe makes up


_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set)


def read_kept(model: Any) -> dict[str, Any]:
    """Return what layers and metrics of the user's classes hold in attributes of their own: plain values,
    and of lists and the like how long they are."""
    plain = vars(keras.Model(name="plain")).keys() | vars(keras.metrics.Metric(name="plain")).keys()
    parts = [*model._flatten_layers(), *flatten_metrics(model.metrics)]
    return {
        f"{part.name}.{name}": found
        for part in parts
        if not is_of_keras(type(part))
        for name, value in vars(part).items()
        if name not in plain and (found := _summarize(value)) is not None
    }


def find_changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of attributes that have changed since."""
    return tuple(sorted(name for name, value in before.items() if after.get(name, value) != value))


def _summarize(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _CONTAINERS):
        return len(value)
    return value.tobytes() if isinstance(value, np.ndarray) else None


# Findings of the runs of a model's steps about its metrics, counters and logs


Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Findings:
    """How variables combine."""

    operations: Mapping[int, Operation]
    """Operations of variables that combine otherwise than by default, by id."""
    refusals: Mapping[str, str]
    """Why steps can't be combined, by step."""
    unexplained: Mapping[str, tuple[str, ...]]
    """Names of the weights, metrics and logs that no operation explains, by step."""


def find_all(
    candidates: Sequence[Candidate], runs: Sequence[StateRun], shares: Shares, tolerance: float
) -> Findings:
    """Return what explains all `runs`."""
    operations: dict[int, Operation] = {}
    refused: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for candidate in candidates:
        moving = [run for run in runs if _moves(candidate, run)]
        movements = [_movement(candidate, run, runs) for run in moving]
        found, operation = find_operation(movements, candidate.default, shares, tolerance)
        if not found:
            refused.update({run.step: _refuse(candidate) for run in moving if run.step not in refused})
            for step in {run.step for run in moving}:
                names.setdefault(step, []).append(_name(candidate))
        elif operation is not None and operation is not candidate.default:
            operations[id(candidate.variable)] = operation
    for run in runs:
        name = find_odd_log(run, _from_zeros(run, runs), shares, tolerance)
        if name is not None:
            refused.setdefault(run.step, refusals.of_log(name, run.step))
            names.setdefault(run.step, []).append(name)
    return Findings(operations, refused, {step: tuple(dict.fromkeys(found)) for step, found in names.items()})


def find_odd_log(run: StateRun, from_zeros: StateRun, shares: Shares, tolerance: float) -> str | None:
    """Return the name of a log that isn't the mean by rows of those of the parts, whose metrics begin with
    0."""
    if run.weights_moved:
        return None
    for name, value in run.whole.logs.items():
        parts = [part.logs[name] for part in from_zeros.parts if name in part.logs]
        if len(parts) == len(shares) and parts[0].shape == value.shape:
            mean = combine(Operation.MEAN, np.stack(parts), shares)
            if not are_close(mean, value, tolerance):
                return name
    return None


def _from_zeros(run: StateRun, runs: Sequence[StateRun]) -> StateRun:
    if run.metrics == ZEROS and not run.weights_moved:
        return run
    same = (each for each in runs if each.step == run.step and each.metrics == ZEROS)
    return next(each for each in same if not each.weights_moved)


def _moves(candidate: Candidate, run: StateRun) -> bool:
    if candidate.metric is not None and run.weights_moved:
        return False
    key = id(candidate.variable)
    before = run.before[key]
    return any(not np.array_equal(before, after[key]) for after in (run.whole_after, *run.parts_after))


def _movement(candidate: Candidate, run: StateRun, runs: Sequence[StateRun]) -> Movement:
    key = id(candidate.variable)
    from_zeros = _from_zeros(run, runs)
    return Movement(
        run.before[key],
        run.whole_after[key],
        np.stack([after[key] for after in run.parts_after]),
        np.stack([after[key] for after in from_zeros.parts_after]),
        key in run.whole.averaged,
    )


def _name(candidate: Candidate) -> str:
    return str(candidate.variable.path if candidate.metric is None else candidate.metric.name)


def _refuse(candidate: Candidate) -> str:
    variable: Any = candidate.variable
    if candidate.metric is None:
        return refusals.of_weight(variable)
    return refusals.of_metric(candidate.metric, variable)


# Find whether a model has parts that aren't Keras' own, of which it isn't known how they combine


_METHODS = ("train_step", "test_step", "compute_loss", "_compute_loss", "compute_metrics")
"""Methods of a model that make its numbers."""
_OVER_BATCHES = ("dice", "tversky", "circle")
"""Keras' functions of losses that, by their options, are computed over all rows of a batch."""


def has_custom_parts(model: Any) -> bool:
    """Return True if steps, layers, losses or metrics of a built model are the user's own, or losses of Keras
    that may be no means over rows."""
    return has_own_numbers(model) or any(not is_of_keras(type(each)) for each in model._flatten_layers())


def find_synchronized(model: Any) -> str | None:
    """Return the name of a layer that normalizes by the rows of all replicas; None without one."""
    layers = (each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization))
    return next((layer.name for layer in layers if layer.trainable and layer.synchronized), None)


def is_built_to_train(model: Any) -> bool:
    """Return True unless the model's losses and metrics are still to be built, from labels: predict() hasn't
    any."""
    parts = (getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None))
    return all(part is None or part.built for part in parts)


def has_own_numbers(model: Any) -> bool:
    """Return True if what the model's metrics and logs are made of is computed by the user's code."""
    return (
        any(not is_of_keras(getattr(type(model), name, None)) for name in _METHODS)
        or any(not _is_loss_of_keras(loss) for loss in read_losses(model))
        or _has_outputs_without_columns(model)
        or getattr(model, "computes_own_numbers", False)
        or any(not _is_loss_of_keras(metric) for metric in flatten_metrics(model.metrics))
    )


def _has_outputs_without_columns(model: Any) -> bool:
    """Return True if an output is one number a row: what Keras' losses do to its columns, they do to the rows
    then."""
    outputs = getattr(model, "outputs", None) or ()
    return any(len(output.shape) < 2 for output in keras.tree.flatten(outputs))


def has_own_train_step(model: Any) -> bool:
    """Return True if the gradient passes through code of the user's on its way to the optimizer."""
    return not is_of_keras(type(model).train_step)


def is_of_keras(thing: Any) -> bool:
    """Return True for a class or function of Keras or insitu, and for None."""
    module = getattr(thing, "__module__", None) or ""
    return thing is None or module.partition(".")[0] in ("keras", "insitu")


def _is_loss_of_keras(loss: Any) -> bool:
    """Return True for a loss or metric of Keras that wraps no function of the user's, and none over whole
    batches."""
    function = getattr(loss, "fn", None) or getattr(loss, "_fn", None)
    if function is not None and not is_of_keras(function if callable(function) else type(function)):
        return False
    if getattr(function, "__name__", "") in _OVER_BATCHES:
        return False
    return is_of_keras(type(loss))
