"""Messages of Ignite's thin protocol, as a real server of Ignite 2.17 sent them (`ignite_recording.py`)."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ignite_recording import CACHE, PAGE_ROWS, RECORDED
from ignite_rows import expected_types

from insitu.extensions.ignite import protocol
from insitu.extensions.ignite.fields import decode_rows, find_fields
from insitu.extensions.ignite.protocol import BinaryType
from insitu.extensions.ignite.rows import find_rows
from insitu.extensions.ignite.wire import Malformed, hash_name, pack_int, pack_string
from insitu.grid.sources import ColumnOptions, SourceOptions

MESSAGES = {name: memoryview(bytes.fromhex(text)) for name, text in json.loads(RECORDED.read_text()).items()}


def test_a_recorded_page_has_the_rows_that_java_wrote():
    found = [
        protocol.decode_type(contents) for name, contents in MESSAGES.items() if name.startswith("type ")
    ]
    types: dict[int, BinaryType] = {kind.number: kind for kind in found if kind}
    page = protocol.decode_page(MESSAGES["page"], None)
    assert page.rows == PAGE_ROWS and page.more
    rows = find_rows(page.data, page.rows)
    configuration = protocol.decode_configuration(MESSAGES["configuration"])
    fields = find_fields(rows, configuration, types.__getitem__, ColumnOptions(), SourceOptions())
    columns = decode_rows(fields, rows, types.__getitem__)
    expected = expected_types(columns["key"])
    assert columns.keys() == {"key", *expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(columns[name].tolist(), np.asarray(values).tolist(), err_msg=name)


def test_recorded_answers_about_a_cache_are_understood():
    names = protocol.decode_names(MESSAGES["names"])
    assert CACHE in names and "SQL_PUBLIC_CITY" in names
    assert protocol.decode_size(MESSAGES["size"]) == 200
    configuration = protocol.decode_configuration(MESSAGES["configuration"])
    assert (configuration.name, configuration.mode, configuration.backups) == (CACHE, "PARTITIONED", 1)
    table = protocol.decode_configuration(MESSAGES["table"])
    assert (table.name, table.key_column) == ("SQL_PUBLIC_CITY", "ID")
    layout = protocol.decode_partitions(MESSAGES["partitions"], hash_name(CACHE))
    nodes = {endpoint.node for endpoint in protocol.decode_endpoints(MESSAGES["endpoints"])}
    assert len(layout.nodes) == 16 and set(layout.nodes) <= nodes


DECODERS = [
    protocol.decode_names,
    protocol.decode_configuration,
    protocol.decode_endpoints,
    protocol.decode_type,
    protocol.decode_handshake,
    protocol.decode_response,
    lambda contents: protocol.decode_partitions(contents, 1),
    lambda contents: protocol.decode_page(contents, None),
]


@given(st.sampled_from(DECODERS), st.binary(max_size=120))
def test_any_bytes_are_understood_or_malformed(decode: object, data: bytes):
    with contextlib.suppress(Malformed):
        decode(memoryview(data))  # type: ignore[operator]


@given(st.sampled_from(sorted(MESSAGES)), st.data())
def test_recorded_messages_with_other_bytes_are_malformed_at_most(name: str, data: st.DataObject):
    message = bytearray(MESSAGES[name])
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    del message[data.draw(st.integers(0, len(message))) :]
    for decode in DECODERS:
        with contextlib.suppress(Malformed):
            decode(memoryview(message))  # type: ignore[no-untyped-call]


def test_a_handshake_has_a_user_only_if_there_is_one():
    assert pack_string("ann") not in protocol.encode_handshake("", "")
    assert protocol.encode_handshake("ann", "word").endswith(pack_string("ann") + pack_string("word"))
    for message in (protocol.encode_handshake("", ""), protocol.encode_handshake("ann", "word")):
        assert message[:4] == pack_int(len(message) - 4)


def test_features_are_bits():
    handshake = protocol.Handshake("", bytes([0b1000, 0b1]))
    assert [bit for bit in range(20) if handshake.has_feature(bit)] == [3, 8]


def test_a_map_of_partitions_with_gaps_is_malformed():
    head = b"\0" * 12 + pack_int(1) + b"\1" + pack_int(1) + pack_int(7) + pack_int(0)
    node = pack_int(1) + bytes([10]) + bytes(16) + pack_int(1)
    assert protocol.decode_partitions(memoryview(head + node + pack_int(0)), 7).nodes == ("0" * 32,)
    with pytest.raises(Malformed, match="gaps"):
        protocol.decode_partitions(memoryview(head + node + pack_int(1)), 7)


def test_names_like_the_wanted_one_come_first():
    names = [f"a{i}" for i in range(20)] + ["SQL_PUBLIC_CITY", "DIGITS", "Digits2"]
    assert protocol.name_list(names, "digits", 4) == "DIGITS, Digits2, SQL_PUBLIC_CITY, a0, ..."
    assert protocol.name_list([], "digits") == "none"
