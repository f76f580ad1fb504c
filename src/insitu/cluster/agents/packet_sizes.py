"""Finds out whether large packets arrive where a connection leads.

A connection is made with small packets. Where the network passes no larger ones, and says so to nobody, it
hangs only when data moves: as where hosts send packets of 9,000 bytes, and a switch between them takes 1,500.
"""

from __future__ import annotations

import contextlib
import socket
import time

from insitu.exchange import has_acknowledged_all

PROBE_BYTES = 1 << 14
"""More than a packet of any network has, and less than the other end's system takes unread."""
_LOOK_SECONDS = 0.01


def find_lost_packets(connection: socket.socket, data: bytes, seconds: float) -> str:
    """Send `data`, of PROBE_BYTES at least. Return why it doesn't arrive within so many seconds; "" where the
    other end's system has acknowledged it. Raises OSError."""
    deadline = time.monotonic() + seconds
    connection.sendall(data)
    while not has_acknowledged_all(connection):
        if time.monotonic() > deadline:
            return (
                f"small packets arrive, and those of {_read_packet_bytes(connection)} bytes don't: the MTU "
                f"of a network between the two must be that of the hosts"
            )
        time.sleep(_LOOK_SECONDS)
    return ""


def _read_packet_bytes(connection: socket.socket) -> int:
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return 0
