"""Layouts of flat buffers."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from insitu.train.replica.flat import compute_spans, group_into_buckets

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12)


@given(SHAPES, st.integers(0, 7))
def test_spans_follow_each_other_without_gaps(shapes, start):
    spans = compute_spans(shapes, start)
    assert [s.shape for s in spans] == shapes
    for span, shape in zip(spans, shapes, strict=True):
        assert (span.start, span.stop - span.start) == (start, prod(shape))
        start = span.stop


@given(SHAPES, st.integers(1, 20))
def test_pieces_hold_each_tensor_once_in_order(shapes, small):
    spans = compute_spans(shapes)
    buckets = group_into_buckets(spans, small)
    assert [i for bucket in buckets for i in bucket.members] == list(range(len(shapes)))
    for bucket in buckets:
        assert bucket.start == spans[bucket.members[0]].start
        assert bucket.stop == spans[bucket.members[-1]].stop
        assert len(bucket.members) == 1 or bucket.stop - bucket.start <= small
