"""Fuzzes all that arrives over sockets, guided by coverage.

Run `make fuzz`, or `fuzz_wire.py TARGET [options of libFuzzer]`. It needs `atheris`. What it finds is written
to `crash-*` in the working folder, and becomes a test.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from typing import Any

import atheris

with atheris.instrument_imports(include=["insitu"]):
    import numpy as np

    from insitu.base.errors import ExchangeError
    from insitu.exchange import handshake, memory_links
    from insitu.exchange.plan import MemberLost
    from insitu.parameters import ParameterServer, Table
    from insitu.parameters.connection import Connection, ConnectionClosed
    from insitu.parameters.rules import REQUEST, MalformedMessage, Message, decode, wire
    from insitu.parameters.rules.sharding_plan import Variable, plan_sharding, to_json
    from insitu.parameters.server_handshake import make_peer_info

SECRET = bytes(range(32))
NAMES = [*wire.WIRE_DTYPES, "object", "float128"]
EDGES = [2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), float("inf"), float("nan"), 0.5, -1, None, True, [], {}]
OPERATIONS = [
    *("define", "define_table", "initialise", "push", "push_rows", "decided", "finish", "load_rows"),
    *("adjust", "finalize", "pull", "pull_rows", "last_applied", "stats", "read_rows", "hello"),
    *("expect_checkpoints", "freeze", "checkpoint", "attach", "copy", "hand_over", "take_over", "noted"),
]
FIELDS = [
    *("shard", "sequence", "step", "rows", "table", "tables", "names", "start", "stop", "slots", "dense"),
    *("at", "segment", "ahead", "size", "word", "grant", "version", "decisions", "updater", "layout"),
    *("cut", "number", "of", "change", "create", "flat", "finite", "training", "thaw", "name", "width"),
    *("dtype", "initializer", "seed", "eviction", "learning_rate"),
]


def fuzz_handshake(data: bytes) -> None:
    """A handshake gets any bytes."""
    side = handshake.accept if data[:1] < b"\x80" else handshake.dial
    running = handshake.Handshake(side(SECRET, {}))
    data = data[1:]
    if data[:1] < b"\x80":
        running.received((handshake.MAGIC + bytes(handshake.NONCE_BYTES))[: running.missing])
    with contextlib.suppress(ExchangeError, ValueError):
        while data and running.missing > 0:
            count = min(len(data), running.missing)
            running.received(data[:count])
            data = data[count:]
    assert running.info is None, "a stranger was let in"


def fuzz_info(data: bytes) -> None:
    """What a peer says about itself is any bytes."""
    with contextlib.suppress(handshake.ProtocolError):
        assert isinstance(handshake._parse_info(data), dict)


def fuzz_ranks(data: bytes) -> None:
    """A list of ranks is any bytes."""
    with contextlib.suppress(MemberLost):
        memory_links._parse_ranks(0, data)


def fuzz_message(data: bytes) -> None:
    """A message describes any arrays, in any numbers."""
    drawn = atheris.FuzzedDataProvider(data)
    described: list[Any] = []
    for _ in range(drawn.ConsumeIntInRange(0, 3)):
        if drawn.ConsumeBool():
            described.append(_draw_value(drawn))
        else:
            shape = [_draw_value(drawn) for _ in range(drawn.ConsumeIntInRange(0, 4))]
            where = _draw_value(drawn), _draw_value(drawn)
            described.append([drawn.PickValueInList(NAMES), shape, *where])
    text = json.dumps({"op": "stats", "arrays": described}).encode()
    segment = np.zeros(64, np.uint8)
    payload = np.frombuffer(drawn.ConsumeBytes(64), np.uint8)
    with contextlib.suppress(MalformedMessage):
        for array in decode(REQUEST, 1, text, payload, lambda number: segment).arrays:
            array.tobytes()


def _draw_value(drawn: Any, depth: int = 3) -> Any:
    kind = drawn.ConsumeIntInRange(0, 7 if depth else 5)
    if kind == 0:
        return drawn.ConsumeInt(drawn.ConsumeIntInRange(1, 9))
    if kind == 1:
        return drawn.PickValueInList(EDGES)
    if kind == 2:
        return drawn.ConsumeUnicodeNoSurrogates(4)
    if kind == 3:
        return drawn.PickValueInList(["t", "w", "sgd", "adam", "keys", "values", "float32"])
    if kind < 6:
        return drawn.ConsumeIntInRange(0, 3)
    values = [_draw_value(drawn, depth - 1) for _ in range(drawn.ConsumeIntInRange(0, 3))]
    return values if kind == 6 else {drawn.PickValueInList(FIELDS): value for value in values}


def fuzz_stream(data: bytes) -> None:
    """A connection gets any bytes, after a header that is right."""
    here, there = socket.socketpair()
    with here, there:
        here.sendall(wire.HEADER.pack(wire.MAGIC, REQUEST, 1, len(data) // 2, len(data) // 4) + data[:60_000])
        here.close()
        with contextlib.suppress(MalformedMessage, ConnectionClosed):
            Connection(there).receive()


_server: ParameterServer | None = None


def fuzz_request(data: bytes) -> None:
    """A server gets any fields in a request."""
    global _server
    _server = _server or _make_server()
    drawn = atheris.FuzzedDataProvider(data)
    meta = {drawn.PickValueInList(FIELDS): _draw_value(drawn) for _ in range(drawn.ConsumeIntInRange(0, 6))}
    meta["op"] = drawn.PickValueInList(OPERATIONS) if drawn.ConsumeIntInRange(0, 20) else _draw_value(drawn)
    here, there = socket.socketpair()
    with here, there:
        connection = Connection(here, make_peer_info("worker", 0, ticket="x"))
        arrays = [np.zeros(2, np.int64), np.zeros((2, 2), np.float32)][: len(data) % 3]
        with contextlib.suppress(MalformedMessage):
            message = Message(REQUEST, 1, {**meta, "directory": "/proc/none"}, arrays)
            _server._mirrors.handle(connection, message)
        _server._mirrors.handle_closed(connection)
        _server._mirrors.tick(time.monotonic())


def _make_server() -> ParameterServer:
    made = ParameterServer(secret=SECRET, mode="bounded", total_replicas=2)
    layout = to_json(plan_sharding([Variable("w", (3,), "float32")], 1, 1 << 16), 1 << 16)
    here, there = socket.socketpair()
    connection = Connection(here, make_peer_info("worker", 0, ticket="x"))
    for meta, arrays in (
        ({"op": "define", "layout": layout, "updater": "sgd"}, []),
        ({"op": "initialise"}, [np.zeros(3, np.float32)]),
        ({"op": "define_table", "table": Table("t", 2).to_json()}, []),
    ):
        made._mirrors.handle(connection, Message(REQUEST, 1, meta, arrays))
    here.close()
    there.close()
    return made


TARGETS: dict[str, Any] = {
    name.removeprefix("fuzz_"): found for name, found in list(globals().items()) if name.startswith("fuzz_")
}


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"Name a target: {', '.join(TARGETS)}. Received: {name!r}")
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
