"""How long a host may be silent, and whether one is."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
import termios
from dataclasses import dataclass

from insitu.errors import InputError

HOST_TIMEOUT_ENV = "INSITU_HOST_TIMEOUT"
"""Seconds for which a host may acknowledge nothing before it counts as lost: the one setting for all
links."""
_DEFAULT_HOST_TIMEOUT = 5.0
"""A link that is away for a short time costs that time, and what the system needs to send again."""
_UNACKED, _LAST_ACK, _RTT, _WINDOW, _INFO_BYTES = 24, 56, 68, 228, 232
"""Offsets in `struct tcp_info`: the packets that aren't acknowledged, the milliseconds since the last
acknowledgement, the microseconds of a round trip, the bytes that the other end has room for (Linux 5.4); and
how
much of it is asked for."""
_LEAST_ROOM = 64
"""Bytes of room at the other end at least, for what isn't even sent to count as lost."""
_ROUND_TRIPS = 20
"""Round trips that the limit is at least, on a long path."""


def read_host_timeout(default: float = _DEFAULT_HOST_TIMEOUT) -> float:
    """Return the seconds for which a host may be silent; `default` where nobody has set them. Raises
    InputError for a value that can't be."""
    text = os.environ.get(HOST_TIMEOUT_ENV) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise InputError(f"{HOST_TIMEOUT_ENV} must be seconds in [0.1, 3600]. Received: {text!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class Silence:
    """What the kernel says about the host at the other end of a connection. That host's kernel acknowledges,
    also for a process that is busy or stopped."""

    #: Seconds since it has acknowledged anything, while something waits for that; else 0.0.
    seconds: float = 0.0
    #: Seconds of a round trip, as the kernel estimates them; 0.0 where it can't say.
    round_trip: float = 0.0

    def exceeds(self, limit: float) -> bool:
        """Return True if it lasts for more than `limit` seconds, and for some round trips if these take
        longer."""
        return self.seconds > max(limit, _ROUND_TRIPS * self.round_trip if limit > 0 else 0)


def measure_silence(connection: socket.socket) -> Silence:
    """Return for how long the other end has acknowledged nothing of what was sent to it. What isn't a
    connection of TCP is never silent."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return Silence()
    if len(info) < _RTT + 4:
        return Silence()
    unacknowledged, silent, round_trip = (
        struct.unpack_from("=I", info, at)[0] for at in (_UNACKED, _LAST_ACK, _RTT)
    )
    # A packet that isn't even sent has no route, or no room at the other end; the latter is no loss.
    room = struct.unpack_from("=I", info, _WINDOW)[0] if len(info) >= _INFO_BYTES else 0
    waits = bool(unacknowledged) or (room >= _LEAST_ROOM and not has_acknowledged_all(connection))
    return Silence(silent / 1000 if waits else 0.0, round_trip / 1e6)


def is_unreachable(connection: socket.socket, milliseconds: float) -> bool:
    """Return True if the host at the other end has acknowledged nothing for so long, or for some round trips
    if these take longer."""
    return measure_silence(connection).exceeds(milliseconds / 1000)


def has_acknowledged_all(connection: socket.socket) -> bool:
    """Return True if the other end's kernel has acknowledged everything that was sent."""
    with contextlib.suppress(OSError, ValueError):  # also for one that is closed
        return not struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return False
