"""Batches as structures."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.grid.reading.structure import (
    ArraySpec,
    apply_maps,
    check_parameters,
    concatenate,
    leaves,
    map_leaves,
    spec_of,
)

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


def test_an_error_in_a_map_says_what_the_map_got() -> None:
    def use(features: Any, label: Any) -> Any:
        return features["c"], label

    batch = ({"a": ONE, "b": np.array(["x", "y", "z"])}, ONE.astype("f4"))
    with pytest.raises(KeyError) as refused:
        apply_maps([use], batch, 3)
    (note,) = refused.value.__notes__
    assert "use, given to map or filter, got features {a: int64[3], b: text[3]}, label float32[3]" in note


@pytest.mark.parametrize("fn", [lambda batch: batch, lambda a, b, c: a])
def test_a_map_of_another_number_of_arguments_is_refused(fn: Any) -> None:
    with pytest.raises(InputError, match=r"2 arguments here: features, label.*`lambda features, label: "):
        apply_maps([fn], (ONE, ONE), 3)
    with pytest.raises(InputError, match="2 arguments"):
        check_parameters(fn, "features", "label")


def test_a_type_error_of_a_map_itself_stays_one() -> None:
    with pytest.raises(TypeError, match="object is not callable") as refused:
        apply_maps([lambda a, b: a()], (ONE, ONE), 3)
    assert "got features int64[3], label int64[3]" in refused.value.__notes__[0]


def test_what_maps_return_becomes_arrays() -> None:
    assert isinstance(apply_maps([lambda a: memoryview(a)], ONE, 3), np.ndarray)


@pytest.mark.parametrize("fn", [lambda a: a[1:], lambda a: 3, lambda a: (a, a[:0])])
def test_maps_keep_the_number_of_rows(fn: Any) -> None:
    with pytest.raises(InputError, match="one entry per row"):
        apply_maps([fn], ONE, 3)
