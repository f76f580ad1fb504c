"""Where a number of steps leads, in epochs of known lengths."""

from __future__ import annotations

from itertools import accumulate

import pytest

from insitu.train.fit import EpochLengths


@pytest.mark.parametrize(
    ("whole", "stride", "epochs"),
    [
        (6, 0, [6, 6, 6]),
        (6, 3, [3, 3, 3]),
        (6, 9, [6, 6, 6]),
        (7, 3, [3, 3, 1, 3, 3, 1, 3]),
        (None, 4, [4, 4]),
    ],
)
def test_steps_and_epochs_are_found_from_each_other(whole: int, stride: int, epochs: list[int]) -> None:
    lengths = EpochLengths(whole, stride)
    places = [(epoch, step) for epoch, length in enumerate(epochs) for step in range(length)]
    assert [lengths.locate(done) for done in range(len(places))] == places
    assert [lengths.count(n) for n in range(len(epochs) + 1)] == [0, *accumulate(epochs)]


def test_nothing_is_known_of_data_without_a_length() -> None:
    assert EpochLengths(None).locate(3) is None
    assert EpochLengths(None).count(3) is None
