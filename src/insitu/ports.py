"""Ports for tasks to listen on.

A task opens its port only seconds after it was given the number, when its framework has been loaded. A port
that the system chose for a bind to port 0 may by then have been given to anybody's outgoing connection. So
ports are drawn from outside the system's ephemeral range, where nothing appears unasked, and each is
verified by binding it. The socket is held until just before the task starts.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from insitu.errors import ClusterError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 15_000, 65_000
_TRIES = 200


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
