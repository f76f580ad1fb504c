"""The sockets of a server."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ipv6 import needs_ipv6
from parameter_servers import DEADLINE, MODEL, Gate, clients, servers

from insitu.parameters import ParameterServer, checkpoints, connect, event_loop
from insitu.parameters.event_loop import TimeBudget


def test_a_server_that_ends_cancels_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, stop = Gate(monkeypatch), checkpoints.CheckpointWriter.cancel

    def stop_and_open(writing: Any) -> None:
        writing._cancelled.set()
        gate.open.set()
        stop(writing)

    monkeypatch.setattr(checkpoints.CheckpointWriter, "cancel", stop_and_open)
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((5,), "float32")})
        client.checkpoint(tmp_path)
        assert gate.reached.wait(DEADLINE)
    assert list((tmp_path / "server-0").iterdir()) == []


def test_stopping_twice_writes_to_no_other_file():
    server = ParameterServer().start()
    number = server._loop._wake_in
    server.stop()
    read, write = os.pipe2(os.O_NONBLOCK)
    own = os.dup2(write, number) if write != number else number
    try:
        server.stop()
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        for file in {read, write, own}:
            os.close(file)


@needs_ipv6
def test_a_server_at_a_number_of_ipv6_is_reached():
    with ParameterServer("[::1]:0") as server:
        assert server.address.startswith("[::1]:")
        with connect([server.address], timeout=20.0) as client:
            client.define(MODEL)


def test_idle_unauthenticated_connections_do_not_block_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_loop, "_MAX_HANDSHAKES", 4)
    monkeypatch.setattr(event_loop, "HANDSHAKE_TIMEOUT", 600.0)
    with ParameterServer() as server, contextlib.ExitStack() as stack:
        host, port = server.address.split(":")
        for _ in range(8):
            stack.enter_context(socket.create_connection((host, int(port))))
        with connect([server.address], timeout=DEADLINE) as client:
            client.define(MODEL)


def test_peers_that_speak_no_handshake_are_disconnected():
    with servers() as addresses:
        host, _, port = addresses[0].rpartition(":")
        with contextlib.ExitStack() as stack:
            callers = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(5)
            ]
            for caller in callers:
                caller.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
            with clients(addresses) as (client,):
                client.define({"a": ((2,), "float32")})
                assert client.pull().result() == 0
            for caller in callers:
                with contextlib.suppress(ConnectionResetError):
                    assert not caller.recv(1000)  # disconnected without an answer


def test_strangers_get_a_share_of_the_time_only(monkeypatch: pytest.MonkeyPatch):
    """A flood of callers would take the thread from training."""
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((5,), "float32", np.zeros(5, np.float32))})
        loop = server._loop
        monkeypatch.setattr(loop, "_callers_budget", TimeBudget(1e-9, 0.0, time.monotonic()))
        host, _, port = server.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(3 * event_loop._ACCEPTS_PER_TURN):
                stranger = stack.enter_context(socket.create_connection((host, int(port)), DEADLINE))
                stranger.sendall(bytes(64))
            deadline = time.monotonic() + DEADLINE
            while not loop._accept_at:
                assert time.monotonic() < deadline
                client.stats()
            # At most those of two turns: the first may have begun before the last one called.
            assert len(loop._handshakes) <= 2 * event_loop._ACCEPTS_PER_TURN
            for sequence in range(20):
                assert (
                    client.push(sequence, 1, gradients={"w": np.ones(5, "f4")}).result(DEADLINE) == "applied"
                )
            assert loop._accept_at > time.monotonic() + 1.0
            assert loop._listener not in [key.fileobj for key in loop._selector.get_map().values()]


def test_callers_are_served_again_after_the_pause(monkeypatch: pytest.MonkeyPatch):
    with ParameterServer() as server:
        monkeypatch.setattr(server._loop, "_callers_budget", TimeBudget(0.01, 0.0, time.monotonic()))
        for _ in range(3):
            with connect([server.address], secret=server.secret) as client:
                assert client.stats()
