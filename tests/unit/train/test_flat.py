"""Layouts of flat buffers."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from insitu.train.replica.flat import into_pieces, lay_out

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12)


@given(SHAPES, st.integers(0, 7))
def test_spans_follow_each_other_without_gaps(shapes, start):
    spans = lay_out(shapes, start)
    assert [s.shape for s in spans] == shapes
    for span, shape in zip(spans, shapes, strict=True):
        assert (span.start, span.stop - span.start) == (start, prod(shape))
        start = span.stop


@given(SHAPES, st.integers(1, 20))
def test_pieces_hold_each_tensor_once_in_order(shapes, small):
    spans = lay_out(shapes)
    pieces = into_pieces(spans, small)
    assert [i for piece in pieces for i in piece.members] == list(range(len(shapes)))
    for piece in pieces:
        assert piece.start == spans[piece.members[0]].start
        assert piece.stop == spans[piece.members[-1]].stop
        assert len(piece.members) == 1 or piece.stop - piece.start <= small
