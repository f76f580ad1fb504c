"""Rows that are drawn at random."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.layout import draw_rows


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 120), st.integers(0, 2**63 - 1))
def test_each_row_comes_once_at_most(counts: list[int], count: int, seed: int) -> None:
    found = draw_rows(counts, count, seed)
    places = np.concatenate([[], *(places for _, places, _ in found)])
    assert sorted(places.tolist()) == list(range(min(count, sum(counts))))
    for shard, _, rows in found:
        assert len(set(rows.tolist())) == len(rows) and ((rows >= 0) & (rows < counts[shard])).all()


def test_all_rows_are_equally_likely() -> None:
    drawn = np.zeros(30, int)
    for seed in range(3000):
        for shard, _, rows in draw_rows([10, 20], 3, seed):
            drawn[rows + 10 * shard] += 1
    # 300 each is expected, with a standard deviation of 16.
    assert drawn.sum() == 9000 and drawn.min() > 220 and drawn.max() < 380
