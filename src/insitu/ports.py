"""Ports for tasks to listen on.

A task opens its port only seconds after it was given the number, when its framework has been loaded. A port
that the system chose for a bind to port 0 may by then have been given to anybody's outgoing connection. So
ports are drawn from outside the system's ephemeral range, where nothing appears unasked, and each is
verified by binding it. The bound socket is handed to the task, which listens on it (`LISTENER_ENV`): so
nobody
else can take the port meanwhile. Where it isn't handed down, the task binds the port itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import stat
from pathlib import Path

from insitu.errors import ClusterError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 15_000, 65_000
_TRIES = 200
LISTENER_ENV = "INSITU_LISTENER"
"""The descriptor of a bound socket that a process was given. Removed from the environment when read."""
_inherited: dict[tuple[str, int], socket.socket] = {}
"""Bound sockets that this process was given, by (host, port). They stay open, and so the ports stay taken."""


def candidate_ports(ephemeral: tuple[int, int]) -> range:
    """Return the longer range of ports in [15000, 65000) outside the ephemeral range; maybe empty."""
    below = range(_LOWEST, max(_LOWEST, min(ephemeral[0], _HIGHEST)))
    above = range(min(_HIGHEST, max(ephemeral[1] + 1, _LOWEST)), _HIGHEST)
    return max(below, above, key=len)


def hold_port(host: str) -> socket.socket:
    """Bind a socket to a free port of `host`; closing it frees the port at once. Raises ClusterError."""
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        low, high = 1, 65_535
    candidates = candidate_ports((low, high))
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.choice(candidates) if len(candidates) >= 1000 else 0
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            held.bind((host, port))
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise ClusterError(
                f"Can't bind a port of {host}: {error}. Tasks listen there: allow it, or give the host that "
                "address"
            ) from error
        return held
    raise ClusterError(
        f"No free port was found on {host} in {_TRIES} tries. End programs that hold ports, or wait a minute "
        "for "
        "those that have just ended"
    )


def take_inherited(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound to (host, port) and was handed to this process; None if there is none.

    The port stays bound when the caller closes the socket: shut down, it listens no more, and the next call
    returns it again.
    """
    descriptor = os.environ.pop(LISTENER_ENV, "")
    if descriptor.isdecimal():
        adopt_listener(int(descriptor))
    held = _inherited.get((host, port))
    return None if held is None else held.dup()


def adopt_listener(descriptor: int) -> None:
    """Keep a bound TCP socket that this process was given. Anything else is left alone."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        held = socket.socket(fileno=os.dup(descriptor))
        if held.type != socket.SOCK_STREAM or held.family not in (socket.AF_INET, socket.AF_INET6):
            held.close()
            return
        os.close(descriptor)
        os.set_inheritable(held.fileno(), False)
        _inherited[held.getsockname()[:2]] = held
