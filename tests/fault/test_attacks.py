"""Attacks on parameter servers and groups: each did harm once, and is refused now."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_ranks import DEADLINE, SECRET
from parameter_servers import clients, servers

from insitu.base.errors import InsituError
from insitu.exchange import memory
from insitu.parameters import ParameterServer, Table
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.event_loop import EventLoop
from insitu.parameters.rules import FAILURE, HEADER, REPLY, REQUEST, BufferRef, Message
from insitu.parameters.rules.wire import MAGIC
from insitu.parameters.server_handshake import connect_to_server, make_peer_info

NOTES = b"my private notes: password=hunter2".ljust(64, b".")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
needs_shared_memory = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")


class Stranger:
    """A peer that sends whatever it likes."""

    def __init__(self, address: str, secret: bytes) -> None:
        own_info = make_peer_info("worker", 0, lane=0)
        opened, self.server = connect_to_server(address, secret, own_info, time.monotonic() + 5)
        self.connection = Connection(opened, self.server)

    def say(self, words: bytes) -> None:
        """Send bytes that may be no message."""
        rest = memoryview(words)
        while rest:
            assert select.select([], [self.connection], [], DEADLINE)[1]
            with contextlib.suppress(BlockingIOError):
                rest = rest[self.connection.socket.send(rest) :]

    def wait(self) -> None:
        """Wait for an answer, or the end of the connection."""
        assert select.select([self.connection], [], [], DEADLINE)[0]

    def ask(self, operation: str, arrays: Any = (), refs: Any = (), **meta: Any) -> Message:
        """Send a request and return its answer, whatever it is."""
        self.connection.send(Message(REQUEST, 7, {"op": operation, "of": 0, **meta}, arrays, refs))
        while True:
            self.wait()
            self.connection.flush()
            for message in self.connection.receive():
                return message


def _steal(address: str, secret: bytes, descriptor: int) -> bytes:
    """Return the bytes of the notes that a stranger could read."""
    try:
        stolen = _read_notes(Stranger(address, secret), descriptor)
    except (InsituError, ConnectionClosed, OSError):
        return b""
    return stolen if stolen in NOTES else b""


def _read_notes(stranger: Stranger, descriptor: int) -> bytes:
    """Try to have the server map a descriptor of this process and to read it through a table."""
    stranger.ask("attach", segment=1, descriptor=descriptor, size=len(NOTES))
    stranger.ask("define_table", table=Table("t", 8).to_json())
    place = BufferRef(1, 0)
    row = np.zeros((1, 8), np.float32)
    stranger.ask("load_rows", [np.array([1]), row], [None, place], table="t", names=["keys", "values"])
    answer = stranger.ask("pull_rows", [np.array([1])], table="t")
    return b"" if answer.kind == FAILURE else answer.arrays[0].tobytes()


@needs_shared_memory
def test_a_file_of_the_owner_cannot_be_read_without_a_secret(tmp_path: Path) -> None:
    """A server that was given no secret let everybody in, and mapped what they named."""
    notes = tmp_path / "notes.txt"
    notes.write_bytes(NOTES)
    notes.chmod(0o600)
    with open(notes, "rb") as file, ParameterServer() as server:
        assert not _steal(server.address, b"", file.fileno())


@needs_shared_memory
def test_a_worker_with_the_secret_cannot_name_a_file_of_the_owner(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_bytes(NOTES)
    notes.chmod(0o600)
    with open(notes, "rb") as file, servers() as addresses:
        assert not _steal(addresses[0], SECRET, file.fileno())
    assert notes.read_bytes() == NOTES and os.stat(notes).st_mode & 0o777 == 0o600


BAD_TEXTS = [
    b"[" * 200_000,
    b'{"op":"stats","arrays":[["float32",[Infinity],-1,0]]}',
    b'{"op":"stats","arrays":[["float32",[0,4611686018427387904],-1,0]]}',
    b'{"op":"stats","arrays":[["float32",[0,281474976710656,281474976710656],-1,0]]}',
    b'{"op":"stats","arrays":[["float32",[-1],-1,0]]}',
    b'{"op":"stats","arrays":[["float32",[1.5],-1,0]]}',
    b'{"op":"stats","arrays":[["float32",[true],-1,0]]}',
    b'{"op":"stats","arrays":[["float32",[1],3,0]]}',
    b'{"op":"stats","arrays":7}',
    b'{"op":"define_table","table":"x"}',
    b'{"op":"define_table","table":{"name":"t","width":1e400}}',
    b'{"op":"define","layout":[],"updater":3}',
    b'{"op":"attach","segment":"x","size":[]}',
    b'{"op":"attach","segment":1,"size":-1}',
    b'{"op":"copy","of":[]}',
    b'{"op":"stats","of":{}}',
    b'{"op":{}}',
    b"[]",
    b"\xff",
    b'{"op":"push","shard":[],"sequence":{},"step":0,"rows":1}',
    b'{"op":"pull_rows","table":"t"}',
    b'{"op":"finish","shard":99999999999999999999999999}',
    b'{"change":true,"op":"push"}',
]
"""Texts of requests. Six of them ended the server with one message."""


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: text[:40].decode(errors="replace"))
def test_no_request_ends_a_server(text: bytes) -> None:
    with servers() as addresses:
        stranger = Stranger(addresses[0], SECRET)
        with stranger.connection.socket:
            stranger.say(HEADER.pack(MAGIC, REQUEST, 1, len(text), 0) + text)
            stranger.wait()
        _assert_alive(addresses[0])


def _assert_alive(address: str) -> None:
    stranger = Stranger(address, SECRET)
    with stranger.connection.socket:
        assert stranger.ask("stats").kind == REPLY


def test_a_checkpoint_without_its_fields_does_not_end_a_server() -> None:
    with servers() as addresses:
        stranger = Stranger(addresses[0], SECRET)
        with stranger.connection.socket:
            assert stranger.ask("freeze").kind == REPLY
            for meta in ({}, {"number": 1}, {"number": [], "cut": "x", "directory": 3}):
                assert stranger.ask("checkpoint", **meta).kind == FAILURE
        _assert_alive(addresses[0])


def test_announced_numbers_do_not_fill_the_memory() -> None:
    with servers() as addresses:
        stranger = Stranger(addresses[0], SECRET)
        with stranger.connection.socket:
            stranger.say(HEADER.pack(MAGIC, REQUEST, 1, 2, 63 << 30) + b"{}" + bytes(1000))
            _assert_alive(addresses[0])


def test_callers_beyond_the_limit_of_descriptors_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accept` failed at once, again and again, for as long as a caller waited."""
    calls = []

    class NoDescriptors:
        def accept(self) -> Any:
            calls.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

    loop = EventLoop("127.0.0.1:0", 0, SECRET)
    real = loop._listener
    try:
        host, _, port = loop.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            monkeypatch.setattr(NoDescriptors, "fileno", lambda self: real.fileno(), raising=False)
            monkeypatch.setattr(loop, "_listener", NoDescriptors())
            for _ in range(50):
                loop.poll(0.0)
    finally:
        loop._listener = real
        loop.close()
    assert len(calls) < 10


@needs_shared_memory
def test_a_server_that_was_stopped_cannot_write_to_memory_that_was_taken_back() -> None:
    """It handled the requests that it had received, and wrote to memory that was lent to other requests by
    then."""
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"w": ((4,), "float32", np.ones(4, np.float32))})
        client.define_tables([Table("t", 4)])
        client.pull().result()
        rows = client.pull_rows("t", [1, 2]).result()
        assert client.requests.connections[0].shares_memory
        client.requests.take_memory_back(client.requests.connections[0], 5.0)
        client.values["w"][:] = 7
        rows[:] = 7
        for late in (client.pull(), client.pull_rows("t", [1, 2]), client.push(0, 1, pull_follows=True)):
            with pytest.raises(InsituError, match="after it was taken back"):
                late.result()
        assert (client.values["w"] == 7).all() and (rows == 7).all()
        # The memory is lent again with the next connection.
        with client.requests.lock:
            client.requests._reconnect(client.requests.connections[0], 10.0)
        client.pull().result()
        assert (client.values["w"] == 1).all()
