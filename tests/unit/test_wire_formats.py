"""All that arrives over a socket, drawn at random: it is understood, or refused by an error that is meant
for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.errors import ExchangeError
from insitu.exchange import memory, memory_passing
from insitu.exchange.handshake import (
    MAGIC,
    NONCE_BYTES,
    Handshake,
    ProtocolError,
    _parse_info,
    accept,
    dial,
)
from insitu.exchange.joining import _check_compatible, _JoinOptions, _make_members
from insitu.exchange.memory_links import _parse_ranks, swap_frames
from insitu.exchange.peer_connections import PeerConnections
from insitu.exchange.plan import GroupConfig, MemberLost, Mismatch
from insitu.parameters import ParameterServer, Table
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.memory_receiver import MemoryReceiver
from insitu.parameters.rules import REQUEST, MalformedMessage, Message, decode, wire
from insitu.parameters.rules.sharding_plan import Variable, plan_sharding, to_json
from insitu.parameters.server_handshake import make_peer_info

SECRET = bytes(range(32))
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 1e400, 0.5, -1e400])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ARRAYS = st.lists(
    st.one_of(
        JSON,
        st.tuples(
            st.sampled_from([*wire.WIRE_DTYPES, "object", "float128"]),
            st.lists(NUMBERS, max_size=4),
            NUMBERS,
            NUMBERS,
        ),
    ),
    max_size=3,
)


@QUICK
@given(
    st.sampled_from([accept, dial]), st.lists(st.binary(min_size=1, max_size=200), max_size=5), st.booleans()
)
def test_a_handshake_refuses_any_bytes(side: Any, parts: list[bytes], begins_well: bool) -> None:
    handshake = Handshake(side(SECRET, {}))
    with contextlib.suppress(ExchangeError, ValueError):
        if begins_well:
            handshake.received(MAGIC + bytes(NONCE_BYTES))
        for part in parts:
            while part and handshake.missing > 0:
                count = min(len(part), handshake.missing)
                handshake.received(part[:count])
                part = part[count:]
    assert handshake.info is None


@QUICK
@given(st.one_of(st.binary(max_size=100), JSON.map(lambda value: json.dumps(value).encode())))
def test_an_info_is_an_object_or_refused(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(_parse_info(body), dict)


@QUICK
@given(st.data())
def test_the_info_of_a_rank_fits_or_is_refused(data: Any) -> None:
    options = _JoinOptions(2, "auto", "none", SECRET, 1.0, lambda: False)
    infos = [options.make_info(GroupConfig(0, rank, ("a:1", "b:2"), (rank,), None)) for rank in range(2)]
    for key in data.draw(st.lists(st.sampled_from(sorted(infos[1])), max_size=3)):
        infos[1][key] = data.draw(JSON)
    with contextlib.suppress(ExchangeError):
        _check_compatible(*infos)
        _make_members(infos, 0)


@QUICK
@given(st.binary(max_size=40))
def test_frames_between_ranks_are_lists_or_a_loss(data: bytes) -> None:
    with contextlib.suppress(MemberLost):
        _parse_ranks(1, data)
    here, there = socket.socketpair()
    with here:
        here.setblocking(False)
        there.sendall(data)
        there.close()
        with contextlib.suppress(MemberLost):
            swap_frames({1: here}, b"\0\0\0\0", time.monotonic() + 10, set())


@QUICK
@given(st.binary(max_size=60))
def test_control_frames_never_raise_but_a_loss(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        connections = PeerConnections(0, {1: here}, {1: here}, 5.0)
        there.sendall(data)
        connections._read_frames(1, here, 1.0)
        with contextlib.suppress(MemberLost, Mismatch):
            connections._raise_if_lost(0.0, 1.0)


@pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")
@QUICK
@given(st.binary(min_size=1, max_size=80), st.integers(0, 2))
def test_what_is_handed_to_a_server_is_memory_or_dropped(data: bytes, count: int) -> None:
    receiver = MemoryReceiver()
    files = list(os.pipe())
    try:
        with memory_passing.dial(receiver.name, os.getpid()) as call:
            socket.send_fds(call, [data], files[:count])
        receiver.receive()
        for ticket, number in list(receiver._files):
            found = receiver.take(ticket, os.getpid(), number)
            with pytest.raises(ExchangeError):
                memory.adopt(-1 if found is None else found, 1)
    finally:
        receiver.close()
        for file in files:
            os.close(file)


@QUICK
@given(st.one_of(st.binary(max_size=60), st.tuples(JSON, ARRAYS)), st.binary(max_size=64))
def test_a_message_is_decoded_or_malformed(content: Any, payload: bytes) -> None:
    if not isinstance(content, bytes):
        meta, arrays = content
        content = json.dumps({"meta": meta, "arrays": arrays}).encode()
    segment = np.zeros(32, np.uint8)
    with contextlib.suppress(MalformedMessage):
        message = decode(REQUEST, 1, content, np.frombuffer(payload, np.uint8), lambda number: segment)
        assert all(array.nbytes <= max(64, len(payload)) for array in message.arrays)


@pytest.fixture(scope="module")
def server() -> Iterator[ParameterServer]:
    """A server with a model and a table, which isn't served: the test gives it messages."""
    made = ParameterServer(secret=SECRET, mode="bounded", total_replicas=2)
    plan = plan_sharding([Variable("w", (3,), "float32")], 1, 1 << 16)
    layout = to_json(plan, 1 << 16)
    for meta in ({"op": "define", "layout": layout, "updater": "sgd"}, {"op": "initialise"}):
        arrays = [np.zeros(3, np.float32)] if meta["op"] == "initialise" else []
        assert _handle(made, Message(REQUEST, 1, meta, arrays)) == wire.REPLY
    table = Table("t", 2).to_json()
    assert _handle(made, Message(REQUEST, 1, {"op": "define_table", "table": table})) == wire.REPLY
    yield made
    made.close()


def _handle(server: ParameterServer, message: Message) -> int | None:
    """Have a server handle a message as if it came over a socket. Return the kind of the answer."""
    here, there = socket.socketpair()
    with here, there:
        connection = Connection(here, make_peer_info("worker", 0, ticket="x"))
        try:
            server._mirrors.handle(connection, message)
            connection.flush()
        except MalformedMessage:
            return None
        finally:
            server._mirrors.handle_closed(connection)
        peer = Connection(there)
        with contextlib.suppress(ConnectionClosed):
            for answer in peer.receive():
                return answer.kind
    return None


OPERATIONS = [
    *("define", "define_table", "initialise", "push", "push_rows", "decided", "finish", "load_rows"),
    "adjust",
    *("finalize", "pull", "pull_rows", "last_applied", "stats", "read_rows", "hello", "expect_checkpoints"),
    *("freeze", "checkpoint", "attach", "copy", "hand_over", "take_over", "noted"),
]
FIELDS = [
    *("shard", "sequence", "step", "rows", "table", "tables", "names", "start", "stop", "slots", "dense"),
    "at",
    *("segment", "ahead", "size", "version", "decisions", "updater", "layout", "cut", "number", "of"),
    "change",
    *("create", "flat", "finite", "training", "thaw"),
]
META = st.dictionaries(st.sampled_from(FIELDS), st.one_of(JSON, st.just("t")), max_size=6)


@settings(QUICK, max_examples=int(os.environ.get("WIRE_EXAMPLES", "150")))
@given(st.one_of(st.sampled_from(OPERATIONS), JSON), META, st.lists(st.integers(0, 5), max_size=2))
def test_no_request_raises_in_a_server(
    server: ParameterServer, operation: Any, meta: dict[str, Any], sizes: list[int]
) -> None:
    arrays = [np.zeros(size, np.int64 if index == 0 else np.float32) for index, size in enumerate(sizes)]
    # What one process may not write to: a checkpoint isn't to appear anywhere.
    fields = {**meta, "op": operation, "directory": "/proc/none"}
    _handle(server, Message(REQUEST, 1, fields, arrays))
    server._mirrors.tick(time.monotonic())
    assert _handle(server, Message(REQUEST, 1, {"op": "stats"})) == wire.REPLY


def test_the_fields_of_a_table_that_cannot_be_are_refused(server: ParameterServer) -> None:
    for bad in ({"name": 3}, {"name": "u", "width": "x"}, {"name": "u", "width": -1}, [], None):
        assert _handle(server, Message(REQUEST, 1, {"op": "define_table", "table": bad})) == wire.FAILURE
