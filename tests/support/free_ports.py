"""Ports for the processes of a test, which no other run of tests on this machine is given meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import TextIO

_PORTS = range(3_000, 15_000)
"""Outside of what the system gives to outgoing connections, and of what insitu gives to tasks."""
_LOCKS = Path(tempfile.gettempdir(), f"insitu-test-ports-{os.geteuid()}")
_held: deque[TextIO] = deque(maxlen=256)
"""Locks of the last ports that were given. A port is bound only some time after it was given."""


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """`host:port` of ports on which nothing listens."""
    return [f"{host}:{_reserve(host)}" for _ in range(count)]


def _reserve(host: str) -> int:
    _LOCKS.mkdir(exist_ok=True)
    for _ in range(1000):
        port = random.SystemRandom().choice(_PORTS)
        lock = (_LOCKS / str(port)).open("w")
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server((host, port)).close()
            if len(_held) == _held.maxlen:
                _held.popleft().close()
            _held.append(lock)
            return port
        lock.close()
    raise AssertionError(f"no port of {host} in {_PORTS} is free")
