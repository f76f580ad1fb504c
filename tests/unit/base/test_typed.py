"""JSON of another process becomes typed values, or is refused with the rule and what was received."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from insitu.base.errors import InputError
from insitu.base.typed import Count, Port, Seconds, Text, convert, convert_exactly


@dataclass(frozen=True)
class Inner:
    sizes: tuple[Count, ...]


@dataclass(frozen=True)
class Outer:
    port: Port
    at: Seconds
    text: Text
    inner: Inner
    is_last: bool = False


GOOD: dict[str, Any] = {"port": 1, "at": 1, "text": "a", "inner": {"sizes": [1, 2]}, "is_last": True}


def test_values_come_back_typed() -> None:
    found = convert_exactly("outer", GOOD, Outer, InputError)
    assert found == Outer(1, 1.0, "a", Inner((1, 2)), True) and type(found.at) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": True}, "outer.port: expected `int`, got `bool`. Received: True"),
        ({"port": 1.0}, "outer.port: expected `int`, got `float`. Received: 1.0"),
        ({"port": "1"}, "outer.port: expected `int`, got `str`. Received: '1'"),
        ({"port": -1}, "outer.port: expected `int` >= 0. Received: -1"),
        ({"port": 1 << 70}, "outer.port: expected `int` <= 65535. Received: 1180591620717411303424"),
        ({"at": float("nan")}, "outer.at: expected `float` > -1000000000000000.0. Received: nan"),
        ({"at": float("inf")}, "outer.at: expected `float` < 1000000000000000.0. Received: inf"),
        ({"at": 10**400}, "outer.at: number out of range. Received: 1"),
        ({"at": False}, "outer.at: expected `float`, got `bool`. Received: False"),
        ({"text": "x" * 4097}, "outer.text: expected `str` of length <= 4096. Received: 'xxx"),
        ({"text": None}, "outer.text: expected `str`, got `null`. Received: None"),
        ({"is_last": 1}, "outer.is_last: expected `bool`, got `int`. Received: 1"),
        ({"inner": {}}, "outer.inner: object missing required field `sizes`. Received: {}"),
        ({"inner": {"sizes": [1, -7]}}, r"outer.inner.sizes[1]: expected `int` >= 0. Received: -7"),
        ({"port": "\ud800"}, "outer: 'utf-8' codec can't encode"),
        ({"inner": {"sizes": [], "more": 1}}, "outer.inner must have the fields sizes. Received: ['more', "),
        ({"more": 1}, "outer must have the fields at, inner, is_last, port, text. Received: ['at', 'inner'"),
    ],
)
def test_other_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        convert_exactly("outer", {**GOOD, **change}, Outer, InputError)
    assert caught.value.message.startswith(message) and len(caught.value.message) < 500


def test_all_fields_must_be_there() -> None:
    for name in GOOD:
        with pytest.raises(InputError, match="outer must have the fields"):
            convert_exactly("outer", {k: v for k, v in GOOD.items() if k != name}, Outer, InputError)


def test_a_place_that_a_sender_makes_up_is_shown_whole() -> None:
    kind = dict[str, Annotated[str, Meta(pattern="^a$")]]
    with pytest.raises(InputError, match="Received"):
        convert("x", {" - at `$.a[99999999999]": "b"}, kind, InputError)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    )
)
def test_any_json_is_refused_with_a_short_message(value: Any) -> None:
    with pytest.raises(InputError) as caught:
        convert("x", json.loads(json.dumps(value)), Outer, InputError)
    assert len(caught.value.message) < 600 and "Received: " in caught.value.message
