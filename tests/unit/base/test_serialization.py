"""Values survive the way to other tasks and into checkpoints."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from insitu.base.serialization import (
    NotSerializable,
    copy_value,
    decode,
    encode,
    format_dtype,
    from_bytes,
    keep_serializable,
    parse_dtype,
    to_bytes,
)


def test_values_survive_the_way_to_other_tasks():
    row = [np.arange(6, dtype="float64").reshape(2, 3), None, np.array(True), np.zeros((0, 4), "int8")]
    for sent, received in zip(row, from_bytes(to_bytes(row)), strict=True):
        if sent is None:
            assert received is None
        else:
            np.testing.assert_array_equal(sent, received)
            assert received.dtype == sent.dtype


def test_what_is_not_serializable_is_refused() -> None:
    for value in (object(), {"f": open}, np.array([object()]), defaultdict(object)):
        with pytest.raises(NotSerializable):
            encode(value)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotSerializable, match="nested"):
        encode(endless)


VALUE = {"a": [1, (2.5, None)], (0, "b"): np.float32(0.1), "c": np.arange(6).reshape(2, 3).T, "d": "text"}


def test_a_structure_comes_back_with_its_types() -> None:
    payload = encode(VALUE)
    assert payload.specs == [["<f4", []], ["<i8", [3, 2]]]
    found = decode(json.loads(json.dumps(payload.tree)), payload.arrays)
    assert found["a"] == [1, (2.5, None)] and type(found["a"][1]) is tuple
    assert found[0, "b"] == np.float32(0.1) and type(found[0, "b"]) is np.float32
    np.testing.assert_array_equal(found["c"], VALUE["c"])


@pytest.mark.parametrize(
    "value",
    [
        {3, "b", ("c", 1.5)},
        frozenset("ab"),
        b"\x00\xff",
        deque([1, [2]], maxlen=3),
        Counter("abca"),
        OrderedDict(b=1, a=[2]),
        defaultdict(list, a=[1]),
        defaultdict(int),
    ],
)
def test_pythons_own_containers_come_back_with_their_kind(value: Any) -> None:
    found = from_bytes(to_bytes([value]))[0]
    assert found == value and type(found) is type(value)
    assert getattr(found, "maxlen", 0) == getattr(value, "maxlen", 0)
    assert getattr(found, "default_factory", 0) == getattr(value, "default_factory", 0)
    assert list(found) == list(value) or isinstance(value, (set, frozenset))


def test_what_grows_with_each_epoch_leaves_the_structure_as_short_as_it_was() -> None:
    """As the History of a fit, which is in each checkpoint."""

    def make(epochs: int) -> dict[str, Any]:
        losses = [1 / (1 + epoch) for epoch in range(epochs)]
        return {"epoch": list(range(epochs)), "history": {"loss": losses, "val_loss": losses[::-1]}}

    few, many = encode(make(100)), encode(make(5000))
    assert few.tree == many.tree and len(json.dumps(many.tree)) < 200
    found = decode(json.loads(json.dumps(many.tree)), many.arrays)
    assert found == make(5000)
    assert {type(value) for value in found["epoch"]} == {int}
    assert {type(value) for value in found["history"]["loss"]} == {float}


@pytest.mark.parametrize(
    "value",
    [
        [0.1, float("inf"), -0.0] * 9,
        [2**63 - 1, -(2**63)] * 9,
        [2**63] * 20,
        [True] * 20,
        [1, 1.0] * 9,
        [1.0] * 15,
        (1.0,) * 20,
        [[1.0] * 20] * 20,
    ],
    ids=str,
)
def test_lists_of_numbers_stay_what_they_are(value: Any) -> None:
    for found in (from_bytes(to_bytes(value)), copy_value(value)):
        assert repr(found) == repr(value)


def test_a_copy_shares_nothing() -> None:
    value = {"list": [np.zeros(2)]}
    copy = copy_value(value)
    value["list"][0][:] = 1
    value["list"].append(np.zeros(1))
    assert [array.tolist() for array in copy["list"]] == [[0, 0]]


def test_only_serializable_attributes_are_kept() -> None:
    assert keep_serializable({"a": 1, "file": object(), "b": [2]}) == {"a": 1, "b": [2]}


def test_dtypes_have_names_also_those_that_numpy_does_not_know() -> None:
    for dtype in (np.dtype("float32"), np.dtype("<U3"), np.dtype(ml_dtypes.bfloat16)):
        assert parse_dtype(format_dtype(dtype)) == dtype
    with pytest.raises(NotSerializable):
        format_dtype(np.dtype([("x", "f4")]))
    with pytest.raises(AttributeError):
        parse_dtype("float1000")
