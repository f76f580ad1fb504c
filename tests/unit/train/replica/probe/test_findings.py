"""Runs say how metrics, counters and logs combine."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from insitu.train.replica.combination import Operation
from insitu.train.replica.probe.observer import MOVED, TEST, TRAIN, ZEROS, Candidate, StateRun
from insitu.train.replica.probe.outcome import Outcome
from insitu.train.replica.probe.probe import find_all

SHARES = np.array([0.4, 0.6])


def outcome(**logs: float) -> Outcome:
    return Outcome([], {name: np.array(float(value)) for name, value in logs.items()}, frozenset())


def run(
    step: str, metrics: str, variable: Any, before: float, whole: float, *parts: float, **logs: Any
) -> Any:
    key, values = id(variable), [{id(variable): np.array(float(part))} for part in parts]
    given = [outcome(**{name: each[i] for name, each in logs.items()}) for i in range(3)]
    return StateRun(
        step, metrics, False, {key: np.array(before)}, given[0], {key: np.array(whole)}, given[1:], values
    )


def test_a_step_is_refused_by_the_variable_or_log_that_does_not_combine() -> None:
    metric = keras.metrics.Sum(name="odd")
    candidate = Candidate(metric.total, None, metric)
    odd = [
        run(TEST, ZEROS, metric.total, 0.0, 9.0, 1.0, 2.0),
        run(TRAIN, ZEROS, metric.total, 0.0, 0.0, 0, 0),
    ]
    findings = find_all([candidate], odd, SHARES, 1e-3)
    assert list(findings.refusals) == [TEST]
    assert "'total' of the metric 'odd' (Sum)" in findings.refusals[TEST]
    logged = [
        run(TRAIN, ZEROS, metric.total, 0.0, 3.0, 1.0, 2.0, fine=(2, 2, 2), twice=(2, 2, 2)),
        run(TRAIN, MOVED, metric.total, 1.0, 4.0, 2.0, 3.0, fine=(2, 2, 2), twice=(5, 5, 5)),
    ]
    findings = find_all([candidate], logged, SHARES, 1e-3)
    assert not findings.operations
    assert "'twice' of train_step" in findings.refusals[TRAIN]


def test_operations_other_than_the_default_are_given() -> None:
    metric = keras.metrics.Sum()
    kept = [
        run(TRAIN, ZEROS, metric.total, 0.0, 3.0, 1.0, 3.0),
        run(TRAIN, MOVED, metric.total, 2.0, 3.0, 2.0, 3.0),
        run(TEST, ZEROS, metric.total, 0.0, 0.0, 0.0, 0.0),
    ]
    findings = find_all([Candidate(metric.total, None, metric)], kept, SHARES, 1e-3)
    assert findings.operations == {id(metric.total): Operation.LARGEST}
    assert not findings.refusals
