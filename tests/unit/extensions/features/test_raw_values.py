from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.extensions.features.raw_values import get_feature, read_entries, read_numbers, to_host


def values(raw: Any) -> list[list[Any]]:
    entries = read_entries(to_host(raw, "k"), "k")
    decode = (lambda v: v) if entries.texts is None else (lambda v: entries.texts[v].decode())
    return [
        [decode(v) for v, there in zip(row, present, strict=True) if there]
        for row, present in zip(entries.values.tolist(), entries.present.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    "raw",
    [
        np.array(["a", "é", ""]),
        np.array(["a", "é", ""], object),
        np.array([b"a", "é".encode(), b""]),
        np.array(["a", "é", None], object),
        ["a", "é", ""],
    ],
)
def test_text_in_any_form(raw: Any):
    assert values(raw) == [["a"], ["é"], [""]]
    assert not read_entries(to_host(raw, "k"), "k").is_ragged


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint32", "bool"])
def test_whole_numbers(dtype: str):
    assert values(np.array([[1, 0], [0, 1]], dtype)) == [[1, 0], [0, 1]]


@pytest.mark.parametrize("kind", ["lists", "arrays"])
def test_rows_of_different_lengths(kind: str):
    rows = [[3], [], [1, 2]]
    raw: Any = rows
    if kind == "arrays":
        raw = np.empty(3, object)
        raw[:] = [np.array(row, np.int64) for row in rows]
    assert values(raw) == rows
    assert read_entries(to_host(raw, "k"), "k").is_ragged
    assert values([["a"], ["b", "c"]]) == [["a"], ["b", "c"]]


def test_lists_of_one_length_are_rows_of_different_lengths():
    assert read_entries(to_host([["a"], ["é"]], "k"), "k").is_ragged
    assert values([["a", ""], ["é", "b"]]) == [["a", ""], ["é", "b"]]
    with pytest.raises(InputError, match=r"'k' with a row of shape \(1, 2\)"):
        values([[["a", "b"]], [["c", "d"]]])
    assert read_numbers(to_host([[1, 2], [3, 4]], "k"), "k", (2,)).tolist() == [[1, 2], [3, 4]]


def test_what_stands_for_a_missing_value():
    numbers = read_entries(np.array([1, -1]), "k").without_missing()
    texts = read_entries(np.array(["", "b"]), "k").without_missing()
    ragged = read_entries([[-1], [1, 2]], "k").without_missing()
    assert numbers.present.tolist() == [[True], [False]]
    assert texts.present.tolist() == [[False], [True]]
    assert ragged.present.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (np.array([1.5]), "of float64"),
        (np.zeros((2, 2, 2), int), r"of shape \(2, 2, 2\)"),
        (np.array(["a", 1], object), "1 of int"),
        (np.array([2**64 - 1], np.uint64), "fit into int64"),
    ],
)
def test_what_has_no_categories_is_refused(raw: Any, message: str):
    with pytest.raises(InputError, match=message):
        read_entries(raw, "k")


def test_numbers_have_the_shape_of_their_column():
    assert read_numbers(np.arange(4), "k", (1,)).shape == (4, 1)
    assert read_numbers(np.zeros((3, 2, 2)), "k", (2, 2)).shape == (3, 4)
    with pytest.raises(InputError, match=r"rows of shape \(3,\).*Pass shape=\(3,\)"):
        read_numbers(np.zeros((2, 3)), "k", (1,))
    with pytest.raises(InputError, match="takes numbers"):
        read_numbers(np.array(["a"]), "k", (1,))
    with pytest.raises(InputError, match="rows of different lengths"):
        read_numbers([[1], [1, 2]], "k", (1,))


def test_a_feature_that_the_data_lacks_is_named():
    with pytest.raises(InputError, match=r"features \['a'\], where column 'c' reads 'b'"):
        get_feature({"a": [1]}, "b", "c")
    with pytest.raises(InputError, match="a dict of features"):
        get_feature(np.zeros(3), "b", "c")  # type: ignore[arg-type]
