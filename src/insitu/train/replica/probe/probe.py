"""Run a model's steps on a few rows, and plan how they combine."""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from insitu.errors import TrainingError
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.probe import refusals
from insitu.train.replica.probe.custom_parts import (
    find_synchronized,
    has_custom_parts,
    has_own_numbers,
    has_own_train_step,
    is_built_to_train,
)
from insitu.train.replica.probe.decisions import (
    FACTORS,
    Gradients,
    are_close,
    are_finite,
    are_rounding,
    find_differences,
    is_linear,
    largest_difference,
    mean_by_rows,
)
from insitu.train.replica.probe.findings import Findings, find_all
from insitu.train.replica.probe.neutral import without_chance
from insitu.train.replica.probe.observer import MOVED, RESET, TEST, TRAIN, Observer, StateRun
from insitu.train.replica.probe.outcome import Outcome
from insitu.train.replica.probe.synthetic_rows import (
    PARTS,
    WHOLE,
    cut,
    double,
    make_rows,
    mark_row,
    take_rows,
)
from insitu.train.replica.state import check_trainable_by_shards

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
        TrainingError: where it is known without a probe that training can't be combined.
    """
    check_trainable_by_shards(model, num_shards, exchanges_totals=not weights_on_servers)
    # What a step of the user's own does with scaled losses isn't known.
    exponent = 0 if has_own_train_step(model) else (num_shards - 1).bit_length()
    synchronized = find_synchronized(model) if num_shards > 1 else None
    if synchronized is not None:
        return CombinationPlan(train_refusal=refusals.of_synchronized(synchronized))
    if num_shards == 1 or not is_built_to_train(model) or not has_custom_parts(model):
        return CombinationPlan(loss_exponent=exponent)
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
    return replace(plan, unchecked=unchecked, number=number, loss_exponent=exponent)


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
        #: Of the largest value: differences up to this are rounding.
        self._tolerance = 5e-2 if _computes_in_halves(model) else 1e-3
        self._has_own_numbers = has_own_numbers(model)
        #: What could not be found out. Written by all that gives up.
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
            if self._is_excused(step):
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
        # A metric may give no number on any made-up rows; those on which all is a number tell more.
        for is_accepted in (_is_finite, _has_finite_gradients):
            for own_weights, lowest in itertools.product(
                (False, True), (0,) if _fails_for_good() else (1, 0)
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
        """Run a step from other states, as far as these tell more."""
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
        of -1. Returns runs and their rows, without those on which the step fails."""
        done = []
        for rows in (take_rows(self._example), mark_row(self._rows)):
            try:
                run = self._observer.run(first.step, rows) if rows is not None else None
            except Exception as error:  # such as a label that the model has no class for
                _log.debug("%s fails on other rows: %s", first.step, error)
                continue
            if run is not None and _is_finite(run):
                done.append((run, rows))
        return done

    def _is_excused(self, step: str) -> bool:
        """Return True if a step can't be judged: rows are coupled by the model itself, where each replica
        takes its own, or random numbers go on that Keras doesn't know of."""
        if self._couples_rows(training=step == TRAIN):
            self.unchecked.append(refusals.COUPLES_ROWS)
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
        """Return True if gradients differ by rounding only, as where they would be 0."""
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

    # What makes a probe say nothing

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
        self._observer.set_state()
        forward = self._observer.steps.forward
        try:
            whole = forward(self._rows, training=training)
            parts = [forward(cut(self._rows, part), training=training) for part in PARTS]
        except Exception as error:
            _log.debug("outputs can't be probed: %s", error)
            return False
        pairs = [
            (one, np.concatenate(leaves)) for one, *leaves in zip(whole, *parts, strict=True) if one.ndim
        ]
        return any(
            one.shape != other.shape or not are_close(one, other, self._tolerance) for one, other in pairs
        )


def _has_finite_gradients(run: StateRun) -> bool:
    return all(are_finite(each.gradients) for each in (run.whole, *run.parts))


def _is_finite(run: StateRun) -> bool:
    """Return True if a step on the whole batch gives numbers."""
    after, logs = run.whole_after.values(), run.whole.logs.values()
    return are_finite(run.whole.gradients) and all(np.isfinite(each).all() for each in (*after, *logs))


def _computes_in_halves(model: Any) -> bool:
    return any("16" in str(getattr(layer, "compute_dtype", "")) for layer in model._flatten_layers())


def _fails_for_good() -> bool:
    """Return True where an index that is out of range would end all work with the device."""
    return keras.backend.backend() == "torch" and keras.src.backend.torch.core.get_device() not in (
        "cpu",
        "meta",
    )
