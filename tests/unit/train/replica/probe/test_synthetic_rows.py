"""Rows of a probe are like those of the data, and the same each time."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from torch_tree import use_torch_tree

from insitu.train.replica.probe.observer import (
    PARTS,
    WHOLE,
    cut,
    double,
    make_rows,
    make_value,
    mark_row,
    take_rows,
)

EXAMPLE = ({"a": np.zeros((1, 3), "float32"), "b": np.zeros((1, 2), "int32")}, np.zeros((1,), "int64"))


def test_rows_have_the_structure_and_kinds_of_the_example() -> None:
    rows = make_rows(EXAMPLE, lowest=1)
    (inputs, labels) = rows
    assert inputs["a"].shape == (WHOLE, 3)
    assert inputs["a"].dtype == np.float32
    assert 0 < inputs["a"].min() < inputs["a"].max() < 1
    assert set(inputs["b"].ravel().tolist()) == {1, 2}
    assert set(labels.tolist()) <= {0, 1}
    again = make_rows(EXAMPLE, lowest=1)
    for one, other in zip(keras.tree.flatten(rows), keras.tree.flatten(again), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.torch
def test_dictionaries_keep_the_order_of_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tree gives them sorted, and a model may read inputs by position."""
    use_torch_tree(monkeypatch)
    rows = make_rows(({"b": np.zeros((1, 3)), "a": np.zeros((1, 2))},), lowest=0)
    assert rows is not None
    assert [(name, value.shape) for name, value in rows[0].items()] == [("b", (WHOLE, 3)), ("a", (WHOLE, 2))]


def test_the_means_of_the_parts_differ() -> None:
    example = tuple(np.zeros((1, 1), dtype) for dtype in ("float32", "int32") for _ in range(20))
    rows = make_rows((example,), lowest=0)
    assert rows is not None
    for leaf in rows[0]:
        first, second = (leaf[part].mean() for part in PARTS)
        assert abs(second - first) > 0.04


def test_data_of_other_kinds_has_none() -> None:
    assert make_rows((np.array([["text"]]), np.zeros(1)), lowest=0) is None
    flags = make_rows((np.array([[True]]),), lowest=0)
    assert flags is not None
    assert flags[0].dtype == bool


def test_parts_hold_each_row_once() -> None:
    rows = make_rows(EXAMPLE, lowest=0)
    joined = np.concatenate([cut(rows, part)[1] for part in PARTS])
    assert np.array_equal(joined, rows[1])
    assert len(double(rows)[1]) == 2 * WHOLE


def test_values_of_vectors_are_positive_and_those_of_matrices_of_both_signs() -> None:
    vector, matrix = make_value(np.zeros(7), 0), make_value(np.zeros((8, 3)), 1)
    assert vector.min() > 0
    assert matrix.min() < 0 < matrix.max()
    assert np.array_equal(matrix, make_value(np.zeros((8, 3)), 1))


def test_rows_of_the_data_are_far_apart_in_their_labels() -> None:
    labels = np.array([3.0, 1.0, np.nan, 9.0, 2.0, 4.0, 5.0, 6.0], "float32")
    inputs, picked = take_rows(({"a": np.arange(8)}, labels))
    assert np.array_equal(labels[inputs["a"]], picked, equal_nan=True)
    assert np.isnan(picked[0]) and picked[-1] == 9 and len(picked) == WHOLE
    assert take_rows((labels[:1], labels[:1])) is None
    assert take_rows((labels, np.zeros(8))) is None
    assert len(take_rows(labels[:2])) == WHOLE


def test_the_first_row_has_no_label() -> None:
    rows = (np.ones((5, 2)), {"a": np.ones((5, 1), "int32"), "b": np.ones(5, bool)}, np.ones(5))
    inputs, labels, weights = mark_row(rows)
    assert inputs is rows[0] and weights is rows[2]
    assert labels["a"].ravel().tolist() == [-1, 1, 1, 1, 1] and labels["b"].all()
    assert mark_row((rows[0],)) is None and mark_row(rows[0]) is None
