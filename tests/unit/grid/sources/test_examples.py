from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_writer import chunk, encode_example, encode_sequence, varint

from insitu.grid.sources.examples import (
    BYTES,
    FLOAT,
    INT64,
    Layout,
    Malformed,
    decode_varints,
    locate_features,
)

INTEGERS = st.integers(-(2**63), 2**63 - 1)


def layout_of(record: bytes) -> tuple[Layout, np.ndarray]:
    return Layout(record, locate_features(record)), np.frombuffer(record, np.uint8)[None]


def values_of(record: bytes, key: str) -> list:
    layout, records = layout_of(record)
    return layout.take(records, key)[0].tolist()


@given(st.lists(INTEGERS, min_size=1, max_size=30))
def test_numbers_are_decoded(numbers: list[int]):
    raw = np.frombuffer(b"".join(map(varint, numbers)), np.uint8)
    assert decode_varints(raw[None]).tolist() == [numbers]


@given(
    numbers=st.lists(INTEGERS, max_size=10),
    floats=st.lists(st.floats(width=32, allow_nan=False), max_size=10),
    texts=st.lists(st.binary(max_size=200), max_size=4),
    packed=st.booleans(),
)
def test_values_come_back(numbers, floats, texts, packed: bool):
    record = encode_example({"n": ("int64", numbers), "f": ("float", floats), "b": ("bytes", texts)}, packed)
    layout, _ = layout_of(record)
    assert [layout.count(key) for key in ("n", "f", "b", "none")] == [
        len(numbers),
        len(floats),
        len(texts),
        0,
    ]
    assert values_of(record, "n") == numbers
    assert values_of(record, "f") == floats
    assert bytes(values_of(record, "b")) == b"".join(texts)


def test_records_of_one_layout_are_taken_together():
    records = [encode_example({"n": ("int64", [i, 200 + i]), "f": ("float", [i / 2])}) for i in range(5)]
    records.append(encode_example({"n": ("int64", [200, 1]), "f": ("float", [0.0])}))
    table = np.stack([np.frombuffer(record, np.uint8) for record in records])
    layout, _ = layout_of(records[0])
    assert layout.matches(table).tolist() == [True] * 5 + [False]
    assert layout.take(table[:5], "n").tolist() == [[i, 200 + i] for i in range(5)]
    assert layout.take(table[:5], "f").ravel().tolist() == [i / 2 for i in range(5)]


def test_the_last_of_equal_keys_counts_and_lists_are_joined():
    first = encode_example({"n": ("int64", [1])})
    assert values_of(first + encode_example({"n": ("int64", [2])}), "n") == [2]
    twice = chunk(3, chunk(1, varint(1))) + chunk(3, chunk(1, varint(2)))
    assert values_of(chunk(1, chunk(1, chunk(1, b"n") + chunk(2, twice))), "n") == [1, 2]


def test_unknown_fields_are_passed_over_and_features_without_a_kind_are_missing():
    unknown = b"\x21" + bytes(8) + b"\x25" + bytes(4) + b"\x28\x07" + chunk(9, b"abc")
    record = unknown + encode_example({"n": ("int64", [3])}) + unknown
    assert values_of(record, "n") == [3]
    assert locate_features(chunk(1, chunk(1, chunk(1, b"n") + chunk(2, b"")))) == {}


def test_steps_of_a_sequence_follow_each_other():
    steps = [("float", [1.0, 2.0]), ("float", []), ("float", [3.0])]
    record = encode_sequence({"label": ("int64", [7])}, {"x": steps, "none": []})
    assert values_of(record, "x") == [1.0, 2.0, 3.0] and values_of(record, "label") == [7]
    assert "none" not in locate_features(record)
    assert locate_features(record)["x"].kind == FLOAT
    assert len(locate_features(record)["x"].ranges) == 2


def test_a_feature_list_of_many_steps_is_read_in_time():
    """Each step copied what was found before it."""
    steps = chunk(1, chunk(3, chunk(1, b"\1"))) * 400_000
    assert steps[:70] == encode_sequence({}, {"n": [("int64", [1])] * 10})[-70:]
    record = chunk(2, chunk(1, chunk(1, b"n") + chunk(2, steps)))
    assert len(locate_features(record)["n"].ranges) == 400_000


@pytest.mark.parametrize(
    "record",
    [
        b"\x0a\x05ab",  # ends behind the record
        b"\x0a",
        b"\xff" * 12,
        b"\x0b\x0c",  # a group
        b"\x02\x00",  # field 0
        chunk(1, chunk(1, chunk(1, b"x") + chunk(2, chunk(2, chunk(1, b"abc"))))),
        chunk(1, chunk(1, chunk(1, b"x") + chunk(2, chunk(3, chunk(1, b"\x80"))))),
        chunk(1, chunk(1, chunk(1, b"x") + chunk(2, chunk(3, chunk(1, b"\x80" * 10 + b"\1"))))),
        chunk(
            2,
            chunk(
                1,
                chunk(1, b"x")
                + chunk(2, chunk(1, chunk(3, chunk(1, b"\1"))) + chunk(1, chunk(2, chunk(1, bytes(4))))),
            ),
        ),
    ],
)
def test_what_no_writer_writes_is_malformed(record: bytes):
    with pytest.raises(Malformed):
        locate_features(record)


@given(st.binary(max_size=80))
def test_any_bytes_are_located_or_malformed(record: bytes):
    try:
        layout, records = layout_of(record)
    except Malformed:
        return
    for key, located in layout.features.items():
        assert located.kind in (BYTES, FLOAT, INT64)
        layout.take(records, key)
        layout.count(key)
