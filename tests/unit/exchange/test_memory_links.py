"""The sockets over which the ranks of a host hand each other memory."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from unittest import mock

import numpy as np
import pytest
from exchange_ranks import SECRET, in_threads
from exchange_sessions import memory_links, run_together

from insitu import exchange
from insitu.base.errors import ExchangeError
from insitu.exchange import memory, memory_passing
from insitu.exchange import memory_links as module
from insitu.exchange.memory_links import swap_frames
from insitu.exchange.plan import MemberLost

needs_shared_memory = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")


@needs_shared_memory
@pytest.mark.parametrize("in_flight", [1, 256])
def test_each_member_gets_the_segments_of_all_others(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IN_FLIGHT", in_flight)
    links, barrier = memory_links(4), threading.Barrier(4)
    files = [memory.create("insitu-test", 100 + member) for member in range(4)]

    def swap(member: int) -> dict[int, tuple[int, int]]:
        return links[member].swap(files[member], 100 + member, lambda: barrier.wait(30) and None)

    for member, received in enumerate(run_together([lambda m=m: swap(m) for m in range(4)])):
        assert sorted(received) == [other for other in range(4) if other != member]
        for other, (file, size) in received.items():
            assert size == 100 + other
            assert os.fstat(file).st_ino == os.fstat(files[other]).st_ino
            os.close(file)
        links[member].close()
    for file in files:
        os.close(file)


def test_frames_of_all_peers_are_swapped_whole() -> None:
    ends: list[dict[int, socket.socket]] = [{}, {}, {}]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        ends[low][high], ends[high][low] = socket.socketpair()
    for table in ends:
        for connection in table.values():
            connection.setblocking(False)
    bodies = [b"x" * 10, b"", b"y" * 60_000]

    def swap(rank: int) -> dict[int, bytes]:
        frame = len(bodies[rank]).to_bytes(4, "big") + bodies[rank]
        found = swap_frames(ends[rank], frame, time.monotonic() + 30, set())
        for connection in ends[rank].values():
            connection.setblocking(True)
            connection.sendall(b"next")  # nothing of what follows is taken
        assert [connection.recv(4) for connection in ends[rank].values()] == [b"next"] * 2
        return found

    for rank, found in enumerate(run_together([lambda r=r: swap(r) for r in range(3)])):
        assert found == {other: bodies[other] for other in range(3) if other != rank}
    for table in ends:
        for connection in table.values():
            connection.close()


@pytest.mark.parametrize("sent", [b"", b"\xff" * 8], ids=["end", "too long"])
def test_a_peer_that_sends_no_frame_is_lost(sent: bytes) -> None:
    here, there = socket.socketpair()
    with here:
        here.setblocking(False)
        there.sendall(sent)
        there.close()
        with pytest.raises(MemberLost):
            swap_frames({1: here}, b"\0\0\0\0", time.monotonic() + 30, set())


def test_a_silent_peer_is_waited_for_until_the_deadline() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        silent = {1}
        with pytest.raises(TimeoutError):
            swap_frames({1: here}, b"\0\0\0\0", time.monotonic() + 0.05, silent)
        assert silent == {1}


def _count_sockets_and_memory() -> int:
    gc.collect()
    found = (os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd"))
    return sum("socket:" in name or "memfd:" in name for name in found)


def _refuse_to_receive(connection: socket.socket, size: int) -> tuple[bytes, int]:
    raise ExchangeError("a policy took the descriptor away")


def _refuse_to_dial(name: str, process: int) -> socket.socket:
    raise ExchangeError("another network namespace")


@needs_shared_memory
@pytest.mark.parametrize(
    "denied", [{"receive": _refuse_to_receive}, {"dial": _refuse_to_dial}], ids=["receive", "dial"]
)
def test_ranks_that_may_not_share_memory_use_tcp_by_themselves(denied: dict[str, object]) -> None:
    """As in containers, or where SELinux takes descriptors away."""
    before = _count_sockets_and_memory()

    def run(rank: int, addresses: list[str]) -> tuple[str, float]:
        with exchange.join(rank, addresses, secret=SECRET) as group:
            return group.transport, float(group.all_reduce(np.ones(3, np.float32))[0])

    with mock.patch.multiple(memory_passing, **denied):
        assert in_threads(3, run) == [("tcp", 3.0)] * 3
        with pytest.raises(ExchangeError, match='transport="shm" needs all ranks on one'):
            in_threads(2, lambda rank, all_: exchange.join(rank, all_, secret=SECRET, transport="shm"))
    assert _count_sockets_and_memory() <= before


@needs_shared_memory
def test_ranks_of_a_host_share_memory() -> None:
    def run(rank: int, addresses: list[str]) -> str:
        with exchange.join(rank, addresses, secret=SECRET) as group:
            return group.transport

    before = _count_sockets_and_memory()
    assert in_threads(3, run) == ["shm"] * 3
    assert _count_sockets_and_memory() <= before
