"""The primitives of Ignite's wire format."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import SourceError
from insitu.extensions.ignite.wire import (
    Malformed,
    Reader,
    end_of_value,
    hash_name,
    pack_byte_array,
    pack_int,
    pack_string,
)


@pytest.mark.parametrize(
    ("name", "number"),
    [("", 0), ("a", 97), ("myCache", 1482644790), ("SQL_PUBLIC_CITY", 1695332366), ("\U0001f600", 1772899)],
)
def test_names_are_hashed_as_java_does(name: str, number: int):
    value = 0
    for unit in memoryview(name.encode("utf-16-le")).cast("H"):
        value = (31 * value + unit) % 2**32
    assert hash_name(name) % 2**32 == value
    if len(name) < 2:
        assert hash_name(name) == number


@given(st.text())
def test_texts_are_read_as_written(text: str):
    reader = Reader(pack_string(text))
    assert reader.read_string() == text and not reader.left


@given(st.binary(max_size=40))
def test_any_bytes_end_or_are_refused(data: bytes):
    with contextlib.suppress(Malformed, SourceError):
        assert 0 < end_of_value(data, 0) <= len(data)


def test_collections_and_maps_are_passed_over():
    one = b"\x03" + pack_int(1)
    collection = bytes([24]) + pack_int(2) + b"\0" + one + pack_string("a")
    pairs = bytes([25]) + pack_int(1) + b"\1" + one + collection
    objects = bytes([23]) + pack_int(7) + pack_int(1) + pairs
    assert end_of_value(objects + b"rest", 0) == len(objects)


def test_values_that_lie_too_deep_are_refused():
    with pytest.raises(Malformed, match="deep"):
        end_of_value((bytes([24]) + pack_int(1) + b"\0") * 100 + b"\x65", 0)


def test_null_is_an_empty_text_or_array():
    assert (
        Reader(b"\x65").read_text() == ""
        and Reader(b"\x65").read_byte_array() == b""
        and Reader(b"\x65").read_uuid() == ""
    )


@pytest.mark.parametrize("read", [Reader.read_string, Reader.read_byte_array, Reader.read_uuid])
def test_another_type_is_refused(read: object):
    with pytest.raises(Malformed):
        read(Reader(b"\x03\0\0\0\0"))  # type: ignore[operator]


def test_counts_beyond_the_end_are_refused():
    with pytest.raises(Malformed, match="elements are announced"):
        Reader(pack_byte_array(b"abc")[:-1], 0).read_byte_array()
