"""The socket in a job's folder at which its controller takes requests.

The folder belongs to its owner alone, and so does the socket. The supervisor opens it and keeps it open for
the whole life of the job, so that a client who connects while a controller is being replaced meets the next.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from insitu.base.paths import JobPaths

_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yield a name of `path` that fits into a socket's address, which holds 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen_for_requests(job: JobPaths) -> socket.socket:
    """Open the job's socket, in the place of one that a dead supervisor left. Raises OSError."""
    job.requests.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        # The file gets its mode from the socket's.
        os.fchmod(listener.fileno(), 0o600)
        with _short_path(job.requests) as name:
            listener.bind(name)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_for_requests(job: JobPaths, timeout: float) -> socket.socket:
    """Connect to the job's socket. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        with _short_path(job.requests) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


def is_from_owner(connection: socket.socket) -> bool:
    """Return True if the process that connected is of this process's user, or root's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.geteuid())
