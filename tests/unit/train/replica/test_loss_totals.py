"""Losses count what they divide by, and divide by what all parts have counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.replica.loss_totals import (
    BatchTotals,
    Kind,
    NeedsTotals,
    count_losses,
    demand_totals,
    divide_by_totals,
    find_kind,
)

ONES = np.ones((2, 3), "float32")
MASK, WEIGHT = np.ones((2, 3), bool), np.ones(2, "float32")
ONE = np.float32(1)
NOTHING = SimpleNamespace(metrics=[])


@pytest.mark.parametrize(
    ("values", "weight", "mask", "reduction", "compiled", "kind"),
    [
        (ONES, None, None, "mean", True, None),
        (ONES, WEIGHT, None, "sum_over_batch_size", True, None),
        (ONES, WEIGHT, MASK, "sum_over_batch_size", False, Kind.MASKED),
        (ONES, WEIGHT, None, "mean_with_sample_weight", False, Kind.WEIGHTED),
        (ONES, None, MASK, "mean_with_sample_weight", False, Kind.WEIGHTED),
        (ONES, None, None, "mean_with_sample_weight", False, None),
        (ONES, ONE, None, "mean_with_sample_weight", False, Kind.SUM),
        (ONES, None, None, "sum", True, Kind.SUM),
        (ONES, WEIGHT, MASK, "sum", False, None),
        (ONE, None, None, "sum", True, None),
        (ONE, ONE, None, "mean", True, None),
        (ONE, WEIGHT, None, "mean", True, Kind.SCALAR),
        (ONE, None, MASK, "sum", True, Kind.SCALAR),
        (ONES, WEIGHT, MASK, None, True, None),
    ],
)
def test_kinds(values: Any, weight: Any, mask: Any, reduction: Any, compiled: bool, kind: Any) -> None:
    assert find_kind(values, weight, mask, reduction, compiled=compiled) is kind


def weighted() -> Any:
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def test_a_loss_that_needs_totals_demands_them() -> None:
    with demand_totals(None):
        assert float(keras.losses.MeanSquaredError()(ONES, 0 * ONES, WEIGHT)) == 1
        with pytest.raises(NeedsTotals):
            weighted()(ONES, 0 * ONES, WEIGHT)
    assert float(weighted()(ONES, 0 * ONES, WEIGHT)) == 1


def test_parts_of_a_loss_add_up_to_the_whole() -> None:
    y, p = np.arange(10.0, dtype="float32").reshape(5, 2), np.zeros((5, 2), "float32")
    weight = np.array([1, 0, 2, 0.5, 4], "float32")
    parts = (slice(0, 2), slice(2, 5))
    totals = np.zeros(2)
    for part in parts:
        with count_losses(NOTHING) as counts:
            weighted()(y[part], p[part], weight[part])
        totals += [len(y[part]), *map(float, counts.totals)]
    assert totals.tolist() == [5, 7.5]
    added = 0.0
    for part in parts:
        with divide_by_totals(None, BatchTotals(totals), len(y[part])):
            added += len(y[part]) / 5 * float(weighted()(y[part], p[part], weight[part]))
    assert added == pytest.approx(float(weighted()(y, p, weight)), rel=1e-6)


def test_metrics_rest_while_losses_are_counted() -> None:
    metric = keras.metrics.Mean()
    with count_losses(SimpleNamespace(metrics=[metric])):
        metric.update_state([3.0])
    metric.update_state([5.0])
    assert float(metric.result()) == 5


def test_a_step_that_calls_more_losses_than_it_counted_is_refused() -> None:
    with divide_by_totals(None, BatchTotals(np.array([4.0, 2.0])), 2):
        assert float(weighted()(ONES, 0 * ONES, WEIGHT)) == 2.0
        with pytest.raises(TrainingError, match="more calls of losses"):
            weighted()(ONES, ONES, WEIGHT)
