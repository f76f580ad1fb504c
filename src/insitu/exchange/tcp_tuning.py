"""Which congestion control a connection uses: how its sender decides when the next packet may go.

Some machines are set up with BBR for the sake of long, lossy paths. It spaces packets by timers, and where a
host's processor is the bottleneck, on loopback and in a rack, that costs more than half of the bandwidth. So
connections start with plain Reno, which any user may choose on any Linux, and those that turn out to cross
a long path get what the machine is set up with. The other order would not do: a connection that has been
with BBR keeps its timers.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct

_LONG = 5_000
"""Microseconds of a round trip from which a path counts as long."""
_INFO_BYTES, _SHORTEST_ROUND_TRIP = 152, 148
"""Of `struct tcp_info`: how much of it is asked for, and where `tcpi_min_rtt` is."""


def choose_before_connect(connection: socket.socket) -> None:
    """For a socket that isn't connected yet, or one that listens: what it accepts inherits this."""
    _system_default()
    _choose(connection, b"reno")


def choose_after_connect(connection: socket.socket) -> None:
    """For a connection that has carried something both ways."""
    with contextlib.suppress(OSError, AttributeError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) == _INFO_BYTES and struct.unpack_from("=I", info, _SHORTEST_ROUND_TRIP)[0] >= _LONG:
            _choose(connection, _system_default())


@functools.cache
def _system_default() -> bytes:
    """What new sockets of this machine have."""
    with contextlib.suppress(OSError, AttributeError), socket.socket() as fresh:
        return fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    return b""


def _choose(connection: socket.socket, name: bytes) -> None:
    """Where the system doesn't know it or doesn't allow it, the connection keeps what it has."""
    if name:
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
