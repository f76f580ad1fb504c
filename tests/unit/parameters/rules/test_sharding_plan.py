"""The placement of variables on servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.parameters.rules import sharding_plan
from insitu.parameters.rules.sharding_plan import Variable, plan_sharding

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
definitions = st.lists(
    st.tuples(shapes, st.sampled_from(["float32", "float64", "bfloat16"])), max_size=8
).map(lambda found: [Variable(f"v{i}", shape, dtype) for i, (shape, dtype) in enumerate(found)])


@settings(max_examples=50, deadline=None)
@given(definitions, st.integers(1, 5), st.integers(1, 4000))
def test_each_element_is_on_one_server_and_all_buffers_are_filled(variables, servers, least):
    plan = plan_sharding(variables, servers, least)
    assert sharding_plan.from_json(sharding_plan.to_json(plan, least)) == plan
    for group in plan.groups:
        whole = np.zeros(plan.sizes[group], int)
        for server in range(servers):
            own = np.zeros(plan.server_size(server, group), int)
            for span in plan.spans_of(server, group):
                own[span.server_offset : span.server_offset + span.size] += 1
                whole[span.offset : span.offset + span.size] += 1
            assert (own == 1).all()
            for piece in plan.pieces_of(server, group):
                assert (
                    piece.offset - plan.offsets[piece.variable.name] == piece.start * piece.variable.row_size
                )
        assert (whole == 1).all()


@settings(max_examples=50, deadline=None)
@given(definitions, st.integers(1, 5), st.integers(1, 4000))
def test_pieces_have_the_smallest_size_and_loads_differ_by_one_piece(variables, servers, least):
    plan = plan_sharding(variables, servers, least)
    cuts = [p for p in plan.pieces if not p.is_whole]
    for piece in cuts:
        row = piece.variable.nbytes // max(1, piece.variable.shape[0])
        assert piece.size * sharding_plan.as_dtype(piece.variable.dtype).itemsize > least - row
    sizes = [(p.server, p.size * sharding_plan.as_dtype(p.variable.dtype).itemsize) for p in plan.pieces]
    loads = [sum(size for holder, size in sizes if holder == server) for server in range(servers)]
    assert max(loads) - min(loads) <= max((size for _, size in sizes), default=0)


@settings(max_examples=20, deadline=None)
@given(definitions, st.integers(1, 5), st.integers(1, 4000))
def test_together_puts_all_variables_on_the_first_server(variables, servers, least):
    plan = plan_sharding(variables, servers, least, together=True)
    assert sharding_plan.from_json(sharding_plan.to_json(plan, least)) == plan
    assert [(p.server, p.is_whole) for p in plan.pieces] == [(0, True)] * len(variables)


def test_a_large_variable_is_cut_by_rows():
    plan = plan_sharding([Variable("small", (10,)), Variable("large", (1000, 100))], 2, min_piece_bytes=1000)
    assert [(p.name, p.server) for p in plan.pieces] == [
        ("small", 0),
        ("large[0:500]", 0),
        ("large[500:1000]", 1),
    ]


def test_pieces_that_follow_each_other_are_sent_as_one():
    plan = plan_sharding([Variable("small", (10,)), Variable("large", (1000, 100))], 2, min_piece_bytes=1000)
    assert [(s.offset, s.server_offset, s.size) for s in plan.spans_of(0, plan.groups[0])] == [(0, 0, 50_010)]
    assert [(s.offset, s.server_offset, s.size) for s in plan.spans_of(1, plan.groups[0])] == [
        (50_010, 0, 50_000)
    ]


def test_a_variable_has_the_parts_that_were_asked_for():
    plan = plan_sharding([Variable("a", (7, 2)), Variable("b", (2,))], 2, parts={"a": 3, "b": 5})
    assert [p.name for p in plan.pieces] == ["a[0:3]", "a[3:5]", "a[5:7]", "b[0:1]", "b[1:2]"]


def test_the_difference_of_two_plans_is_named():
    old = plan_sharding([Variable("a", (2,)), Variable("b", (3,))], 1)
    for variables, difference in (
        ([Variable("a", (2,))], "'b' is missing"),
        ([Variable("a", (2,)), Variable("b", (3,)), Variable("c", ())], "'c' is new"),
        ([Variable("a", (2,)), Variable("b", (4,))], r"float32[4] instead of float32[3]"),
        ([Variable("b", (3,)), Variable("a", (2,))], "another order"),
    ):
        assert difference in sharding_plan.describe_difference(old, plan_sharding(variables, 1))
    assert not sharding_plan.describe_difference(old, old)


def test_bad_definitions_are_refused():
    with pytest.raises(InputError, match="must be of float32"):
        Variable("a", (2,), "int32")
    with pytest.raises(InputError, match="Received twice: 'a'"):
        plan_sharding([Variable("a", (2,)), Variable("a", (2,))], 1)
