"""Messages over a socket."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tls_peers import handshake

from insitu.exchange.tls import TlsSettings, load_identity
from insitu.exchange.tls_socket import TlsSocket
from insitu.parameters.connection import _RECEIVE_BYTES, Connection, ConnectionClosed
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


def test_no_message_stays_behind_in_an_encrypted_connection():
    """One that has arrived with others isn't reported by a selector, so `receive` must return it, too."""
    here, there = socket.socketpair()
    identity = load_identity(TlsSettings())
    dialled = TlsSocket(here, identity.client, accepted=False)
    accepted = TlsSocket(there, identity.server, accepted=True)
    with dialled, accepted:
        handshake(dialled, accepted)
        connection = Connection(accepted)
        empty = sum(map(len, wire.encode(Message(wire.REQUEST, 1, {"x": ""}))))
        # The first message fills the buffer of the connection exactly.
        texts = ["x" * (_RECEIVE_BYTES - empty), "second"]
        for number, text in enumerate(texts):
            buffers = wire.encode(Message(wire.REQUEST, number, {"x": text}))
            assert dialled.sendmsg(buffers) == sum(map(len, buffers))
        assert [message.meta["x"] for message in connection.receive()] == texts


def test_an_excessive_length_is_not_allocated():
    here, there = socket.socketpair()
    with here, there:
        here.sendall(struct.pack("!2sBxQIQ", wire.MAGIC, wire.REQUEST, 1, 2, 1 << 60) + b"{}")
        with pytest.raises(MalformedMessage, match="too large"):
            Connection(there).receive()


def wait_for(readable: list[socket.socket], writable: list[socket.socket]) -> None:
    """Wait until a socket is ready. Unlike `select`, for descriptors of any number."""
    with selectors.DefaultSelector() as selector:
        for sockets, event in ((readable, selectors.EVENT_READ), (writable, selectors.EVENT_WRITE)):
            for one in sockets:
                selector.register(one, event)
        assert selector.select(30)


def test_a_peer_that_does_not_read_is_not_cut():
    """TCP_USER_TIMEOUT, 1.5 s, also counted the time for which a worker computed and read nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
        with caller, called:
            connection = Connection(caller)
            assert not caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            connection.send(Message(wire.REQUEST, 1, {}, [np.zeros(30 << 20, np.uint8)]))
            assert connection.has_unsent
            connection.check_host()
            received = Connection(called)
            came: list[Message] = []
            while not came:
                wait_for([called], [caller])
                connection.flush()
                came = received.receive()
            assert came[0].arrays[0].size == 30 << 20


def test_numbers_of_requests_have_64_bits():
    """Changes to a mirror are numbered: the server died at change 2**32."""
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"".join(bytes(part) for part in wire.encode(Message(wire.REQUEST, 1 << 40, {}))))
        assert Connection(there).receive()[0].request == 1 << 40
