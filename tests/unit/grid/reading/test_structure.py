"""Batches as structures."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.grid.reading.structure import ArraySpec, apply_maps, concatenate, leaves, map_leaves, spec_of

Pair = namedtuple("Pair", ["left", "right"])

ONE = np.arange(3)
STRUCTURES: list[Any] = [
    ONE,
    (ONE, ONE + 1),
    [ONE, (ONE, {"a": ONE})],
    {"b": ONE, "a": (ONE, ONE)},
    Pair(ONE, {"x": ONE}),
]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_form_is_kept(structure: Any) -> None:
    twice = map_leaves(lambda array: array * 2, structure)
    assert type(twice) is type(structure)
    assert [a.tolist() for a in leaves(twice)] == [(a * 2).tolist() for a in leaves(structure)]
    joined = concatenate([structure, twice])
    assert type(joined) is type(structure) and all(len(a) == 6 for a in leaves(joined))
    assert all(spec == ArraySpec((None,), ONE.dtype) for spec in leaves(spec_of(structure)))


def test_maps_get_tuples_apart_and_all_else_whole() -> None:
    assert apply_maps([lambda a, b: {"sum": a + b}, lambda d: d["sum"]], (ONE, ONE), 3).tolist() == [0, 2, 4]
    assert apply_maps([], "as it is", 3) == "as it is"


def test_what_maps_return_becomes_arrays() -> None:
    assert isinstance(apply_maps([lambda a: memoryview(a)], ONE, 3), np.ndarray)


@pytest.mark.parametrize("fn", [lambda a: a[1:], lambda a: 3, lambda a: (a, a[:0])])
def test_maps_keep_the_number_of_rows(fn: Any) -> None:
    with pytest.raises(InputError, match="one entry per row"):
        apply_maps([fn], ONE, 3)
