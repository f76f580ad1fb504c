"""Means that count each batch once are found."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.replica.step_watch import find_batch_means


def ids(metric) -> set[int]:
    return {id(variable) for variable in metric.variables}


def test_a_number_for_the_batch_is_told_from_numbers_for_rows() -> None:
    whole, rows, weighted = keras.metrics.Mean(), keras.metrics.Mean(), keras.metrics.Mean()
    scalar = keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.mean(y - p))
    with find_batch_means() as found:
        whole.update_state(2.0)
        rows.update_state(np.ones(3, "float32"))
        weighted.update_state(2.0, sample_weight=3)
        scalar.update_state(np.ones((3, 1), "float32"), np.zeros((3, 1), "float32"))
        keras.metrics.MeanSquaredError().update_state(np.ones((3, 1)), np.ones((3, 1)))
    assert found.variables == ids(whole) | ids(scalar)
    assert float(whole.count.numpy()) == 1
    keras.metrics.Mean().update_state(1.0)
    assert found.variables == ids(whole) | ids(scalar)


def test_one_that_counts_both_is_refused() -> None:
    metric = keras.metrics.Mean(name="mine")
    with find_batch_means(), pytest.raises(TrainingError, match="'mine', updated in one step"):
        metric.update_state(2.0)
        metric.update_state(np.ones(3, "float32"))
