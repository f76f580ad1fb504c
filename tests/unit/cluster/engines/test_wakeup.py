"""One descriptor for signals and files."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest
from readiness import wait_readable

from insitu.cluster.engines.wakeup import Wakeup

PATIENCE = 60.0


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    before = signal.getsignal(signal.SIGUSR1)
    made = Wakeup(signal.SIGUSR1)
    yield made
    made.close()
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


def is_ready(wakeup: Wakeup, seconds: float = 0.0) -> bool:
    return bool(wait_readable([wakeup], seconds))


def test_a_signal_makes_it_readable_until_it_is_taken(wakeup: Wakeup):
    assert not is_ready(wakeup)
    signal.raise_signal(signal.SIGUSR1)
    assert is_ready(wakeup, PATIENCE)
    assert wakeup.take_signals() == bytes([signal.SIGUSR1])
    assert wakeup.take_signals() == b""
    assert not is_ready(wakeup)


def test_a_watched_file_makes_it_readable(wakeup: Wakeup, sockets: tuple[socket.socket, socket.socket]):
    mine, other = sockets
    wakeup.watch(mine)
    assert not is_ready(wakeup)
    other.send(b"x")
    assert is_ready(wakeup, PATIENCE)
    wakeup.unwatch(mine)
    assert not is_ready(wakeup)


def test_room_to_write_is_watched_only_while_asked_for(
    wakeup: Wakeup, sockets: tuple[socket.socket, socket.socket]
):
    wakeup.watch(sockets[0], writable=True)
    assert is_ready(wakeup, PATIENCE)
    wakeup.watch(sockets[0])
    assert not is_ready(wakeup)
