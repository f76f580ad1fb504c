"""The warning that numbers leave this host unencrypted."""

from __future__ import annotations

import logging
import socket

import pytest

from insitu.exchange import socket_handshake


class _Connection:
    def __init__(self, peer: str, own: str) -> None:
        self.getpeername = lambda: (peer, 1)
        self.getsockname = lambda: (own, 2)


@pytest.mark.parametrize(
    ("peer", "own", "lines"),
    [
        ("127.0.0.1", "127.0.0.1", 0),
        ("10.0.0.2", "10.0.0.2", 0),
        ("::1", "::1", 0),
        ("10.0.0.2", "10.0.0.1", 1),
    ],
)
def test_another_host_is_warned_about_once(
    peer: str, own: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    socket_handshake._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "insitu"):
        for _ in range(3):
            socket_handshake.warn_about_plain_text(_Connection(peer, own))  # type: ignore[arg-type]
    assert len(caplog.records) == lines
    socket_handshake._warn_once.cache_clear()


def test_sockets_without_hosts_are_passed_over() -> None:
    here, there = socket.socketpair()
    with here, there:
        socket_handshake.warn_about_plain_text(here)
    socket_handshake.warn_about_plain_text(here)
