"""Memory that is handed to a server."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from parameter_servers import clients, servers

from insitu.base.errors import ExchangeError, ParameterError
from insitu.exchange import memory, memory_passing
from insitu.parameters import memory_receiver, server_connection
from insitu.parameters.memory_receiver import MemoryReceiver, hand_over, make_ticket
from tests.support.descriptors import find_new_descriptors, list_descriptors

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")


@pytest.fixture
def receiver() -> Iterator[MemoryReceiver]:
    made = MemoryReceiver()
    yield made
    made.close()


@pytest.fixture
def file() -> Iterator[int]:
    made = memory.create("insitu-test", 100)
    yield made
    os.close(made)


def test_memory_is_given_for_its_ticket_number_and_process(receiver: MemoryReceiver, file: int) -> None:
    ticket, process = make_ticket(), os.getpid()
    hand_over(receiver.name, process, ticket, 1, file)
    assert receiver.take(make_ticket(), process, 1) is None
    assert receiver.take(ticket, process + 1, 1) is None
    assert receiver.take(ticket, process, 2) is None
    found = receiver.take(ticket, process, 1)
    assert found is not None and os.fstat(found).st_ino == os.fstat(file).st_ino
    assert receiver.take(ticket, process, 1) is None
    os.close(found)


def test_what_nobody_asks_for_is_dropped(receiver: MemoryReceiver, file: int) -> None:
    before = list_descriptors()
    ticket = make_ticket()
    hand_over(receiver.name, os.getpid(), ticket, 1, file)
    with memory_passing.dial(receiver.name, os.getpid()):
        receiver.receive()
        receiver.expire(time.monotonic() + 60)
    assert receiver.take(ticket, os.getpid(), 1) is None
    assert find_new_descriptors(before, "socket:", "/memfd:insitu-test") == []


def test_callers_and_segments_are_bounded(
    receiver: MemoryReceiver, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_receiver, "_MAX_WAITING", 2)
    before = list_descriptors()
    silent = [memory_passing.dial(receiver.name, os.getpid()) for _ in range(5)]
    tickets = [make_ticket() for _ in range(5)]
    for ticket in tickets:
        hand_over(receiver.name, os.getpid(), ticket, 1, file)
        receiver.receive()
    found = find_new_descriptors(before, "socket:", "/memfd:insitu-test")
    assert len(found) == len(silent) + 3  # one caller that waits, and two segments
    taken = [receiver.take(ticket, os.getpid(), 1) for ticket in tickets]
    assert taken[:3] == [None] * 3 and None not in taken[3:]
    for descriptor in taken[3:]:
        os.close(descriptor or -1)
    for connection in silent:
        connection.close()


def test_garbage_is_dropped(receiver: MemoryReceiver) -> None:
    with memory_passing.dial(receiver.name, os.getpid()) as call:
        socket.send_fds(call, [b"x"], [call.fileno()])
        receiver.receive()
        assert call.recv(1) == b"" if call.getblocking() else True


def _refuse(*_: object) -> None:
    raise ExchangeError("a policy forbids it")


def test_a_worker_that_may_not_hand_memory_over_uses_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "hand_over", _refuse)
    with servers() as addresses:
        with clients(addresses) as (client,):
            assert not client.requests.connections[0].shares_memory
            client.define({"w": ((3,), "float32", np.arange(3, dtype=np.float32))})
            client.pull().result()
            np.testing.assert_array_equal(client.values["w"], [0, 1, 2])
        with pytest.raises(ParameterError, match="a policy forbids it"), clients(addresses, transport="shm"):
            pass


def test_a_worker_of_this_host_shares_memory() -> None:
    with servers() as addresses, clients(addresses, transport="shm") as (client,):
        assert client.requests.connections[0].shares_memory
