"""Messages over a socket."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.rules import wire
from insitu.parameters.rules.wire import MalformedMessage, Message

arrays = st.lists(
    st.tuples(st.sampled_from(wire.WIRE_DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=4
).map(lambda found: [np.ones(shape, wire.wire_dtype(dtype)) * i for i, (dtype, shape) in enumerate(found)])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.dictionaries(st.text(max_size=5), st.integers()), arrays), max_size=4), st.data()
)
def test_messages_survive_any_cuts(contents: Any, data: Any):
    here, there = socket.socketpair()
    with here, there:
        connection, came = Connection(there), []
        sent = [Message(wire.REQUEST, i, {"x": meta}, given) for i, (meta, given) in enumerate(contents)]
        stream = b"".join(bytes(part) for message in sent for part in wire.encode(message))
        while stream:
            cut = data.draw(st.integers(1, max(1, min(len(stream), 400))))
            here.sendall(stream[:cut])
            stream = stream[cut:]
            came += connection.receive()
        assert [(m.request, m.meta) for m in came] == [(m.request, m.meta) for m in sent]
        for one, other in zip(sent, came, strict=True):
            for given_array, found in zip(one.arrays, other.arrays, strict=True):
                assert given_array.dtype == found.dtype
                np.testing.assert_array_equal(
                    np.asarray(given_array, np.float64), np.asarray(found, np.float64)
                )


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=wire.HEADER.size, max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes):
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        here.close()
        with contextlib.suppress(MalformedMessage, ConnectionClosed):
            Connection(there).receive()


def test_an_excessive_length_is_not_allocated():
    here, there = socket.socketpair()
    with here, there:
        here.sendall(struct.pack("!2sBxIIQ", wire.MAGIC, wire.REQUEST, 1, 2, 1 << 60) + b"{}")
        with pytest.raises(MalformedMessage, match="too large"):
            Connection(there).receive()
