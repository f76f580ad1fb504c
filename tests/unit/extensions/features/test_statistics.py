"""Statistics are those of all rows, and the same bits however partitions come together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.extensions.features.statistics import MeanAndVariance, Quantiles
from insitu.grid import Counts

NUMBERS = st.lists(st.lists(st.integers(-1000, 1000), max_size=30), min_size=1, max_size=6)


def parts_of(statistic: Any, partitions: list[np.ndarray], size: int = 7) -> list[Any]:
    return [
        statistic.of_partition([rows[i : i + size] for i in range(0, len(rows), size)]) for rows in partitions
    ]


@given(NUMBERS)
def test_moments_are_those_of_all_rows(lists: list[list[int]]) -> None:
    partitions = [np.array(rows, np.float32).reshape(-1, 1) for rows in lists]
    found = MeanAndVariance((0,)).merge(parts_of(MeanAndVariance((0,)), partitions))
    rows = np.concatenate(partitions)
    assert int(found["count"]) == len(rows)
    if len(rows):
        np.testing.assert_allclose(found["mean"], rows.mean(0, dtype=np.float64), atol=1e-9, rtol=1e-9)
        squares = found["squares"] / len(rows)
        np.testing.assert_allclose(squares, rows.var(0, dtype=np.float64), atol=1e-6, rtol=1e-9)


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_moments_of_rows_of_several_numbers(axes: tuple[int, ...]) -> None:
    rows = np.random.default_rng(2).normal(size=(50, 3, 2)).astype(np.float32)
    found = MeanAndVariance(axes).merge(parts_of(MeanAndVariance(axes), [rows[:20], rows[20:]]))
    count = 50 if axes == (0,) else 150
    assert int(found["count"]) == count
    np.testing.assert_allclose(found["mean"].ravel(), rows.mean(axes, dtype=np.float64).ravel())
    np.testing.assert_allclose(found["squares"].ravel() / count, rows.var(axes, dtype=np.float64).ravel())


@given(NUMBERS)
def test_few_values_are_kept_as_they_are(lists: list[list[int]]) -> None:
    partitions = [np.array(rows, np.int64) for rows in lists]
    found = Quantiles().merge(parts_of(Quantiles(), partitions))
    assert found["values"].tolist() == sorted(value for rows in lists for value in rows)
    assert set(found["weights"].tolist()) <= {1}


@pytest.mark.parametrize("rows", [99, 100, 101, 1000, 12345])
def test_kept_values_stand_for_as_many_as_they_say(rows: int) -> None:
    values = np.random.default_rng(1).permutation(rows)
    found = Quantiles(points=100).of_partition([values[:50], values[50:]])
    assert found["weights"].sum() == rows and len(found["values"]) == min(rows, 100)
    # A value is the largest of those that it stands for: its rank is the sum of weights up to it.
    np.testing.assert_array_equal(found["values"] + 1, np.cumsum(found["weights"]))


@given(NUMBERS)
def test_counts_are_those_of_all_rows(lists: list[list[int]]) -> None:
    partitions = [np.array(rows, np.int64) for rows in lists]
    found = Counts(False).merge(parts_of(Counts(False), partitions))
    expected = Counter(value for rows in lists for value in rows)
    assert dict(zip(Counts(False).keys_of(found), found["counts"].tolist(), strict=True)) == expected
    order = Counts(False).by_frequency(found)
    assert order == sorted(expected, key=lambda value: (expected[value], value), reverse=True)


@given(st.lists(st.lists(st.text(max_size=3), max_size=20), min_size=1, max_size=5))
def test_texts_are_counted_too(lists: list[list[str]]) -> None:
    partitions = [np.array(rows, object) for rows in lists]
    found = Counts(True).merge(parts_of(Counts(True), partitions))
    expected = Counter(value for rows in lists for value in rows)
    assert dict(zip(Counts(True).keys_of(found), found["counts"].tolist(), strict=True)) == expected


def test_values_of_another_kind_are_refused() -> None:
    with pytest.raises(InputError, match="NaN in row 1"):
        MeanAndVariance((0,)).of_partition([np.array([0.0, np.nan])])
    with pytest.raises(InputError, match="are of numbers"):
        Quantiles().of_partition([np.array(["a"], object)])
    with pytest.raises(InputError, match=r"Received: numbers \(int64\)"):
        Counts(True).of_partition([np.array([1])])
    with pytest.raises(InputError, match=r"Received: texts"):
        Counts(False).of_partition([np.array(["a"], object)])
