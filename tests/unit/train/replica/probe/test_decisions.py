"""Numbers decide how a step combines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.train.replica.combination import Operation
from insitu.train.replica.probe.decisions import (
    FACTORS,
    Movement,
    are_close,
    are_rounding,
    find_operation,
    is_linear,
    largest_difference,
    mean_by_rows,
)

Move = Callable[[float, np.ndarray], float]
MOVES: dict[str, tuple[Move, Operation | None]] = {
    "sum of rows": (lambda value, rows: value + rows.sum(), None),
    "number of rows": (lambda value, rows: value + len(rows), None),
    "number of batches": (lambda value, rows: value + 1, Operation.MEAN),
    "moving average": (lambda value, rows: 0.8 * value + 0.2 * rows.mean(), Operation.MEAN),
    "mean of the last batch": (lambda value, rows: rows.mean(), Operation.MEAN),
    "largest": (lambda value, rows: max(value, rows.max()), Operation.LARGEST),
    "smallest": (lambda value, rows: min(value, rows.min()), Operation.SMALLEST),
}
ROWS = st.lists(st.integers(1, 99).map(lambda n: n / 100), min_size=5, max_size=5, unique=True)
PARTS = (slice(0, 2), slice(2, 5))
SHARES = np.array([0.4, 0.6])


def movements(move: Move, rows: np.ndarray) -> list[Movement]:
    """As a probe sees it, from 0 and from other values."""

    def after(start: float) -> np.ndarray:
        return np.array([move(start, rows[part]) for part in PARTS])

    return [
        Movement(np.array(start), np.array(move(start, rows)), after(start), after(0.0), False)
        for start in (0.0, 0.37, 5.0)
    ]


@given(ROWS, st.sampled_from(sorted(MOVES)))
def test_what_explains_a_movement_is_found(rows: list[float], name: str) -> None:
    move, expected = MOVES[name]
    found = find_operation(movements(move, np.array(rows)), None, SHARES, 1e-4)
    assert found == (True, expected)


@given(ROWS)
def test_what_nothing_explains_is_not(rows: list[float]) -> None:
    moves: list[Move] = [
        lambda value, rows: value + rows.mean() ** 2 + len(rows) ** 2,
        lambda value, rows: value + rows.max() * len(rows),
        lambda value, rows: value + np.linalg.norm(rows) * (1 + rows.var()),
    ]
    for move in moves:
        assert find_operation(movements(move, np.array(rows)), None, SHARES, 1e-6) == (False, None)


def test_the_default_is_preferred_and_weights_sum_their_changes() -> None:
    def of(move: Move) -> list[Movement]:
        return movements(move, np.linspace(0.1, 0.9, 5))

    def steps(value: float, rows: np.ndarray) -> float:
        return value + 1

    for default in (Operation.MEAN, Operation.FIRST):
        assert find_operation(of(steps), default, SHARES, 1e-4) == (True, default)
        counts = find_operation(of(lambda value, rows: value + len(rows)), default, SHARES, 1e-4)
        assert counts == (True, Operation.SUM_OF_CHANGES)
    assert find_operation([], Operation.FIRST, SHARES, 1e-4) == (True, Operation.FIRST)


def test_a_mean_that_counts_batches_is_averaged_from_zero() -> None:
    parts = np.array([1.0, 2.0])
    movement = Movement(np.array(7.0), np.array(8.6), 7 + parts, parts, True)
    assert find_operation([movement], None, SHARES, 1e-4) == (True, None)


def test_infinities_equal_themselves_only() -> None:
    inf = np.array([np.inf, 1.0])
    assert are_close(inf, inf, 1e-3)
    assert not are_close(inf, np.array([1.0, 1.0]), 1e-3)
    assert not are_close(np.array([np.nan]), np.array([1.0]), 1e-3)
    assert are_close(np.array(1.0), np.array(1.0004), 1e-3)


def test_differences_are_relative_and_rounding_of_tiny_gradients_counts_nothing() -> None:
    one = [np.array([1.0, 2.0]), np.array([1e-9])]
    other = [np.array([1.0, 2.0]), np.array([-1e-9])]
    assert largest_difference(one, other) == 0
    assert largest_difference(one, [np.array([1.0, 2.2]), np.array([1e-9])]) == pytest.approx(0.082, abs=0.01)
    assert mean_by_rows([one, other], SHARES)[0].tolist() == pytest.approx([1.0, 2.0])
    assert largest_difference([], []) == 0


GRADIENT = np.array([0.3, -2.0, 0.01])
CHANGES = {
    "nothing": (lambda g: g, True),
    "weight decay by hand": (lambda g: 0.5 * g + 0.1, True),
    "clipped values": (lambda g: np.clip(g, -0.05, 0.05), False),
    "clipped norm": (lambda g: g / max(1.0, np.linalg.norm(g)), False),
    "normalized": (lambda g: g / np.linalg.norm(g), False),
    "signs": (np.sign, False),
    "squares": (np.square, False),
}


@pytest.mark.parametrize(("change", "linear"), CHANGES.values(), ids=CHANGES)
def test_gradients_may_be_scaled_and_added_up(change, linear: bool) -> None:
    assert is_linear([[change(factor * GRADIENT)] for factor in FACTORS], 1e-2) is linear


def test_no_gradient_at_all_is_linear() -> None:
    assert is_linear([[np.zeros(2)]] * 3, 1e-2)


def test_rounding_explains_differences_that_a_rounding_error_makes_too() -> None:
    assert are_rounding([1.3, 1e-5], [0.9, 1e-6], 1e-3)
    assert not are_rounding([1.3, 0.5], [0.9, 1e-5], 1e-3)  # a sum of rows in the second variable
