"""What the runs of a model's steps say about its metrics, counters and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.combination import Operation, combine
from insitu.train.replica.probe import refusals
from insitu.train.replica.probe.decisions import Movement, are_close, find_operation
from insitu.train.replica.probe.observer import ZEROS, Candidate, StateRun

Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Findings:
    """How variables combine."""

    operations: Mapping[int, Operation]
    """Of variables that combine otherwise than by default, by id."""
    refusals: Mapping[str, str]
    """Why steps can't be combined, by step."""


def find_all(
    candidates: Sequence[Candidate], runs: Sequence[StateRun], shares: Shares, tolerance: float
) -> Findings:
    """Return what explains all `runs`."""
    operations: dict[int, Operation] = {}
    refused: dict[str, str] = {}
    for candidate in candidates:
        moving = [run for run in runs if _moves(candidate, run)]
        movements = [_movement(candidate, run, runs) for run in moving]
        found, operation = find_operation(movements, candidate.default, shares, tolerance)
        if not found:
            refused.update({run.step: _refuse(candidate) for run in moving if run.step not in refused})
        elif operation is not None and operation is not candidate.default:
            operations[id(candidate.variable)] = operation
    for run in runs:
        name = find_odd_log(run, _from_zeros(run, runs), shares, tolerance)
        if name is not None:
            refused.setdefault(run.step, refusals.of_log(name, run.step))
    return Findings(operations, refused)


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


def _refuse(candidate: Candidate) -> str:
    variable: Any = candidate.variable
    if candidate.metric is None:
        return refusals.of_weight(variable)
    return refusals.of_metric(candidate.metric, variable)
