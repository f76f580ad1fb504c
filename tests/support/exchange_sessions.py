"""Members of one process that are connected by socket pairs, or share a segment, for tests of one module."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from insitu.exchange import memory
from insitu.exchange.memory_links import MemoryLinks
from insitu.exchange.peer_connections import PeerConnections
from insitu.exchange.plan.transport import Members
from insitu.exchange.shm_barrier import SpinPolicy
from insitu.exchange.shm_layout import SegmentLayout
from insitu.exchange.shm_session import ShmSession
from insitu.exchange.tcp_session import TcpSession

DEADLINE = 60.0


@contextlib.contextmanager
def peer_connections(size: int, stall_timeout: float = 30.0) -> Iterator[list[PeerConnections]]:
    """The connections of `size` members in pairs."""
    control: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    data: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    with contextlib.ExitStack() as stack:
        for table in (control, data):
            for low in range(size):
                for high in range(low + 1, size):
                    pair = socket.socketpair()
                    for connection in pair:
                        connection.setblocking(False)
                        stack.enter_context(connection)
                    table[low][high], table[high][low] = pair
        yield [
            PeerConnections(rank, control[rank], data[rank], stall_timeout, threads=True)
            for rank in range(size)
        ]


@contextlib.contextmanager
def tcp_sessions(
    shards: Sequence[Sequence[int]], stall_timeout: float = 30.0, compiled: bool = True
) -> Iterator[list[TcpSession]]:
    """A session for each member; `shards[rank]` are those of a member."""
    size, count = len(shards), sum(map(len, shards))
    with peer_connections(size, stall_timeout) as connections:
        hosted = tuple(map(tuple, shards))
        sessions = [
            TcpSession(Members(rank, hosted, count), connections[rank], range(size), 0)
            for rank in range(size)
        ]
        for session in sessions:
            session.kernels = session.kernels if compiled else None
        yield sessions


@contextlib.contextmanager
def shm_sessions(
    shards: Sequence[Sequence[int]],
    stall_timeout: float = 30.0,
    find_dead: Callable[[], Sequence[int]] = lambda: (),
) -> Iterator[list[ShmSession]]:
    """A session for each member, all in one segment."""
    size, count = len(shards), sum(map(len, shards))
    hosted = tuple(map(tuple, shards))
    file = memory.create("insitu-test", SegmentLayout(size, count).size)
    links = memory_links(size)
    try:
        yield [
            ShmSession(
                Members(rank, hosted, count),
                memory.adopt(os.dup(file), SegmentLayout(size, count).size),
                links[rank],
                range(size),
                SpinPolicy(2),
                find_dead,
                stall_timeout,
            )
            for rank in range(size)
        ]
    finally:
        os.close(file)
        for each in links:
            each.close()


def memory_links(size: int) -> list[MemoryLinks]:
    """The links of `size` members, over socket pairs."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends[low][high], ends[high][low] = socket.socketpair(socket.AF_UNIX)
    for table in ends:
        for connection in table.values():
            connection.setblocking(False)
    return [MemoryLinks(member, table) for member, table in enumerate(ends)]


def run_together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all functions, each in a thread; an exception is a result, too."""
    results: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a member hangs"
    return results
