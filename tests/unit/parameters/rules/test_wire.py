"""The form of messages."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from insitu.parameters.rules import wire
from insitu.parameters.rules.wire import MalformedMessage

described = st.dictionaries(st.text(max_size=5), st.integers())


def no_segment(number: int) -> Any:
    raise MalformedMessage(f"no segment {number}")


@pytest.mark.parametrize(
    "described",
    [
        [["float32", [10], -1, 0]],
        [["object", [1], -1, 0]],
        [["float32", [-1], -1, 0]],
        [["float32", [1], 7, 0]],
        [["float32"]],
        "arrays",
        7,
    ],
)
def test_arrays_that_lie_outside_are_refused(described: Any):
    with pytest.raises(MalformedMessage):
        wire.decode(
            wire.REQUEST, 1, json.dumps({"arrays": described}).encode(), np.zeros(4, np.uint8), no_segment
        )


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff"])
def test_a_description_that_is_no_object_is_refused(text: bytes):
    with pytest.raises(MalformedMessage):
        wire.decode(wire.REQUEST, 1, text, np.zeros(0, np.uint8), no_segment)
