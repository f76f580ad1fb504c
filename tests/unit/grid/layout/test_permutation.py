"""Keyed permutations without a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.layout.permutation import Permutation


def test_a_permutation_is_that_of_every_release() -> None:
    """A job that continues after an upgrade must find its rows in the order that it left them in."""
    assert Permutation(12, 7, 0, 0).apply(np.arange(12)).tolist() == PINNED_0
    assert Permutation(12, 7, 1, 0).apply(np.arange(12)).tolist() == PINNED_1
    assert Permutation(10**10, 7).apply(np.array([0, 1, 10**10 - 1])).tolist() == PINNED_LARGE


PINNED_0 = [1, 7, 11, 3, 9, 4, 8, 5, 6, 0, 10, 2]
PINNED_1 = [0, 2, 8, 9, 10, 6, 1, 3, 5, 11, 4, 7]
PINNED_LARGE = [3179252711, 5246181466, 1816582985]


@given(st.integers(0, 3000), st.lists(st.integers(0, 2**64 - 1), max_size=3))
def test_each_number_comes_once_and_is_found_again(size: int, key: list[int]) -> None:
    numbers = np.arange(size)
    found = Permutation(size, *key).apply(numbers)
    assert np.array_equal(np.sort(found), numbers)
    assert np.array_equal(Permutation(size, *key).invert(found), numbers)


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_large_ones_stay_within_their_size(size: int, key: int, data: st.DataObject) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    permutation = Permutation(size, key)
    found = permutation.apply(numbers)
    assert found.min() >= 0 and found.max() < size
    assert np.array_equal(permutation.invert(found), numbers)


def test_each_number_comes_at_each_place_equally_often() -> None:
    places = np.array([Permutation(8, seed).apply(np.arange(8)) for seed in range(1000)])
    for place in range(8):
        counts = np.bincount(places[:, place], minlength=8)
        assert counts.min() > 80 and counts.max() < 170


def test_neighbours_are_strangers_and_keys_matter() -> None:
    numbers = Permutation(100_000, 3).apply(np.arange(100_000))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    other = Permutation(100_000, 4).apply(np.arange(100_000))
    assert np.mean(numbers == other) < 0.001
    assert not np.array_equal(
        Permutation(64, 1, 2).apply(np.arange(64)), Permutation(64, 2, 1).apply(np.arange(64))
    )


def test_sizes_beyond_the_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="Received: -1"):
        Permutation(-1, 0)
