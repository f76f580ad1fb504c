"""The congestion control of a connection: how its sender decides when the next packet may be sent.

Some machines are set up with BBR for the sake of long, lossy paths. It spaces packets by timers. If a host's
processor is the bottleneck, on loopback and in a rack, that costs more than half of the bandwidth. So
connections start with plain Reno, which any user may choose on any Linux, and those that turn out to cross a
long path get the machine's default. The other order would not work: a connection that has used BBR keeps its
timers.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct

_LONG_ROUND_TRIP = 5_000
"""Microseconds of a round trip from which a path counts as long."""
_INFO_BYTES, _MIN_RTT = 152, 148
"""How much of `struct tcp_info` is asked for, and the offset of `tcpi_min_rtt` in it."""


def choose_before_connect(connection: socket.socket) -> None:
    """Choose Reno for a socket that isn't connected yet, or one that listens: accepted connections inherit
    it."""
    _read_system_default()
    _set_congestion_control(connection, b"reno")


def choose_after_connect(connection: socket.socket) -> None:
    """Choose the machine's default if the path is long. Call it once bytes have been sent both ways."""
    with contextlib.suppress(OSError, AttributeError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) == _INFO_BYTES and struct.unpack_from("=I", info, _MIN_RTT)[0] >= _LONG_ROUND_TRIP:
            _set_congestion_control(connection, _read_system_default())


@functools.cache
def _read_system_default() -> bytes:
    """Return the congestion control of new sockets on this machine."""
    with contextlib.suppress(OSError, AttributeError), socket.socket() as fresh:
        return fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    return b""


def _set_congestion_control(connection: socket.socket, name: bytes) -> None:
    """Set it if the system knows and allows it; else the connection keeps what it has."""
    if name:
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
