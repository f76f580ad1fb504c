"""How gradients are checked and averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.parameters import gradients
from insitu.parameters.gradients import GradientAverager, Gradients
from insitu.parameters.tables import Table


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 5000), st.integers(0, 99))
def test_the_mean_is_weighted_by_rows(rows: list[int], size: int, seed: int):
    rng = np.random.default_rng(seed)
    flats = [rng.normal(size=size).astype("f4") for _ in rows]
    held = [Gradients({"float32": flat}) for flat in flats]
    weights = [float(count) for count in rows]
    means = GradientAverager().average_dense(held, weights, {"float32": np.zeros(size, "f4")})
    if not sum(rows):
        assert means == {}
        return
    expected = sum(flat.astype("f8") * count for flat, count in zip(flats, rows, strict=True)) / sum(rows)
    np.testing.assert_allclose(means["float32"], expected, rtol=1e-4, atol=1e-5)


def test_a_shard_without_rows_may_send_nothing():
    held = [Gradients({"float32": np.ones(3, "f4")}), Gradients()]
    means = GradientAverager().average_dense(held, [2.0, 0.0], {"float32": np.zeros(3, "f4")})
    np.testing.assert_array_equal(means["float32"], np.ones(3))


def test_rows_of_tables_are_weighted_by_the_rows_of_all_pushes():
    keys = np.array([1, 2])
    held = [Gradients(rows={"t": (keys, np.ones((2, 1), "f4"))}), Gradients()]
    ((name, found, rows),) = GradientAverager.average_rows(held, [1.0, 3.0])
    assert name == "t"
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(rows, np.full((2, 1), 0.25))


def test_rows_that_only_shards_without_rows_sent_are_left_out():
    held = [Gradients(rows={"t": (np.array([1]), np.ones((1, 1), "f4"))}), Gradients()]
    assert list(GradientAverager.average_rows(held, [0.0, 3.0])) == []


def test_clipping_counts_the_elements_that_are_not_finite():
    values = np.array([1, np.nan, -np.inf, 4], "f4")
    clipped, count = gradients.clip_nonfinite(values)
    np.testing.assert_array_equal(clipped, [1, 0, 0, 4])
    assert (count, clipped.dtype) == (2, np.float32)


@pytest.mark.parametrize(
    ("flat", "own"),
    [
        (np.zeros(3, "f4"), None),
        (np.zeros(3, "f4"), np.zeros(4, "f4")),
        (np.zeros(3, "f8"), np.zeros(3, "f4")),
    ],
)
def test_a_dense_gradient_must_fit_the_values(flat: Any, own: Any):
    with pytest.raises(InputError, match=r"server 2 must bring .* Received: float"):
        gradients.check_dense("float32", flat, own, 2)
    gradients.check_dense("float32", flat, np.zeros_like(flat), 2)


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        (np.zeros(2, "i4"), np.zeros((2, 3), "f4"), "Keys of table 't' must be int64"),
        (np.zeros(2, "i8"), np.zeros((2, 4), "f4"), "a row for each key"),
        (np.zeros(2, "i8"), np.zeros((1, 3), "f4"), "a row for each key"),
        (np.zeros(2, "i8"), np.zeros((2, 3), "f8"), "a row for each key"),
    ],
)
def test_rows_must_fit_the_table(keys: Any, rows: Any, message: str):
    with pytest.raises(InputError, match=message):
        gradients.check_rows(Table("t", 3), keys, rows)


def test_a_policy_for_nan_is_one_of_two():
    gradients.check_nan_policy("clip")
    with pytest.raises(InputError, match="Received: 'ignore'"):
        gradients.check_nan_policy("ignore")
