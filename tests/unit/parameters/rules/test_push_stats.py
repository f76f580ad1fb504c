"""Counts of pushes."""

from __future__ import annotations

from insitu.parameters.rules.push_stats import StalenessHistogram


def test_staleness_is_counted_by_powers_of_two():
    histogram = StalenessHistogram()
    for staleness in (0, 0, 1, 2, 3, 9):
        histogram.add(staleness)
    assert histogram.rows() == [("0", 2), ("1", 1), ("2-3", 2), ("4-7", 0), ("8-15", 1)]
    assert histogram.largest == 9
    assert histogram.mean == 2.5
    assert StalenessHistogram.from_json(histogram.to_json()) == histogram
