"""A replica's floats without the rows of tables."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.train.parameter_server.session import match_dense_slices
from insitu.train.replica.flat import compute_spans


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=8))
def test_dense_floats_follow_each_other_in_order(variables: list[tuple[int, bool]]) -> None:
    spans = compute_spans([(size,) for size, _ in variables])
    marked = [SimpleNamespace(insitu_rows=rows) for _, rows in variables]
    whole = np.arange(sum(size for size, _ in variables))
    is_row = np.repeat([rows for _, rows in variables], [size for size, _ in variables]).astype(bool)
    dense = np.full(int((~is_row).sum()), -1)
    slices = match_dense_slices(list(zip(marked, spans, strict=True)))
    for own, target in slices:
        dense[target] = whole[own]
    assert dense.tolist() == whole[~is_row].tolist()
    # Neighbours are copied at once.
    assert all(a[0].stop < b[0].start for a, b in itertools.pairwise(slices))
