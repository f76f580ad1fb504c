"""What goes over the wire: nothing but a well-formed request gets through, whatever arrives."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid.transfer.requests import (
    MAX_LENGTH,
    ReadRequest,
    RowsRequest,
    chunk_bytes,
    decode_request,
    encode_request,
    make_chunk,
)

READ = ReadRequest("a/b", 3, 7, 0, 10)
ROWS = RowsRequest("0123-7-ab", 7, 100, False)

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["..", "../x", "a/../b", "/etc", "a//b", "a/", ".a", "a\0b", "crc32:zz", "~", "a~b"]),
    st.lists(st.integers(), max_size=2),
)


@pytest.mark.parametrize("request_", [READ, ROWS])
def test_requests_come_back_equal(request_: Any):
    assert decode_request(type(request_), encode_request(request_)) == request_


@given(data=st.data(), kind=st.sampled_from([READ, ROWS]))
def test_changed_fields_are_refused_or_name_a_file_of_the_store(data: st.DataObject, kind: Any):
    fields = asdict(kind)
    for name in data.draw(st.sets(st.sampled_from(sorted(fields)), min_size=1)):
        fields[name] = data.draw(values)
    try:
        request = decode_request(type(kind), json.dumps(fields).encode())
    except InputError:
        return
    if isinstance(request, RowsRequest):
        assert "/" not in request.token and request.unit >= 0 and request.sequence >= 0
        return
    path = Paths(Path("/home")).partition("n", request.cache, request.version, request.partition)
    assert path.is_relative_to("/home/nodes/n") and ".." not in path.parts and path.name.startswith("part-")
    assert 0 <= request.length <= MAX_LENGTH and request.offset >= 0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(data: bytes):
    for kind in (ReadRequest, RowsRequest):
        with pytest.raises(InputError, match="request"):
            decode_request(kind, data)


@pytest.mark.parametrize(
    "change",
    [
        {"cache": "../../etc"},
        {"version": 0},
        {"version": True},
        {"partition": 1 << 16},
        {"partition": 1.0},
        {"offset": -1},
        {"length": 0},
        {"length": MAX_LENGTH + 1},
        {"node": "x"},
    ],
)
def test_reads_outside_of_what_can_be_are_refused(change: dict[str, Any]):
    with pytest.raises(InputError, match="Received"):
        decode_request(ReadRequest, json.dumps({**asdict(READ), **change}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"token": "../x"},
        {"token": "a/b"},
        {"unit": -1},
        {"sequence": 1 << 44},
        {"last": 1},
        {"rows": "x"},
    ],
)
def test_rows_outside_of_what_can_be_are_refused(change: dict[str, Any]):
    with pytest.raises(InputError, match="Received"):
        decode_request(RowsRequest, json.dumps({**asdict(ROWS), **change}).encode())


def test_a_large_or_deep_request_is_refused():
    for data in (b"[" * 3000, b"[" * 100_000):
        with pytest.raises(InputError, match="request"):
            decode_request(ReadRequest, data)


@given(st.binary(max_size=100))
def test_chunks_carry_their_bytes(data: bytes):
    assert bytes(chunk_bytes(make_chunk(data))) == data


def test_what_is_no_chunk_is_refused():
    batch = make_chunk(b"abc")
    for bad in (
        pa.record_batch([pa.array([b"a", b"b"])], schema=batch.schema),
        pa.record_batch([pa.array([None], pa.binary())], schema=batch.schema),
        pa.record_batch([pa.array([1])], names=["data"]),
    ):
        with pytest.raises(InputError, match="one value of bytes"):
            chunk_bytes(bad)
