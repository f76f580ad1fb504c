"""bfloat16 between hosts, with error feedback."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_ranks import in_threads

from insitu import exchange
from insitu.exchange.compression import ErrorFeedback


def test_rounding_errors_are_added_back() -> None:
    row = np.random.default_rng(0).standard_normal(70_001).astype(np.float32)
    rounding = ErrorFeedback(row.size)
    total = np.zeros(row.size, np.float64)
    for _ in range(64):
        rounding.round(row)
        total += rounding.rounded.astype(np.float64)
    # Without feedback the mean would keep one rounding's error, 2**-9 of the value.
    error = np.abs(total / 64 - row) / np.abs(row)
    assert error.max() < 2**-9 / 32


def test_elements_that_are_not_finite_leave_no_error() -> None:
    rounding = ErrorFeedback(3)
    rounding.round(np.array([np.nan, np.inf, 1.0], np.float32))
    assert np.isnan(rounding.rounded[0].astype(float)) and np.isinf(rounding.rounded[1].astype(float))
    rounding.round(np.array([1.0, 2.0, 1.0], np.float32))
    assert rounding.rounded.astype(np.float32).tolist() == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("length", [10, 100_000])
def test_all_ranks_get_the_same_bits_near_the_sum(length: int) -> None:
    rows = np.random.default_rng(length).standard_normal((3, length)).astype(np.float32)

    def run(rank: int, addresses: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with exchange.join(rank, addresses, transport="tcp", compression="bfloat16") as group:
            array = rows[rank].copy()
            group.all_reduce(array)
            weighted = np.full(length, np.nan, np.float32) if rank == 1 else rows[rank].copy()
            group.all_reduce(weighted, "weighted_mean", [0.0 if rank == 1 else 3.0])
            exact = np.full(length, rank, np.float64)
            group.all_reduce(exact)
            assert (exact == 3.0).all()
            return array, weighted, group.reduce_scatter(rows[rank])

    results = in_threads(3, run)
    assert all(array.tobytes() == results[0][0].tobytes() for array, _, _ in results)
    assert np.abs(results[0][0] - rows.sum(0)).max() < 0.05
    assert np.abs(results[2][1] - (rows[0] + rows[2]) / 2).max() < 0.05
    parts = np.concatenate([part for _, _, part in results])
    assert parts.tobytes() == (rows[0] + rows[1] + rows[2]).tobytes(), "only all_reduce is compressed"
