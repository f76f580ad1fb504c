"""Hands shared memory from one process of a host to another, as a descriptor over a Unix socket.

The kernel says who is at the other end (SO_PEERCRED): only processes of the same user are served, and only
the
process that the other side has said it is. So nobody can have memory mapped that isn't its own, nor reach
what
another process has open.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import socket
import struct

from insitu.base.errors import ExchangeError
from insitu.exchange.forks import close_in_children

_CREDENTIALS = struct.Struct("=3i")
"""`struct ucred`: process, user, group."""
_PREFIX = "\0insitu-"
"""Prefix of names, which are in the kernel's own name space: no file, and nothing is left behind."""
_FILES_PER_MESSAGE = 4
_STRANGERS_AT_ONCE = 64
"""Callers of other users that are disconnected in one call of `accept`: they may call without end."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` after which the caller still waits: the listener would be ready again at once."""


class MemoryListener:
    """A Unix socket to which processes of this user hand memory."""

    def __init__(self) -> None:
        #: The name that callers need.
        self.name = secrets.token_hex(16)
        #: Whether the last caller couldn't be accepted for want of a descriptor, and still waits.
        self.lacks_descriptors = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._socket)
        try:
            self._socket.setblocking(False)
            self._socket.bind(_PREFIX + self.name)
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return (connection, id of the calling process) of the next caller of this user; None: nobody calls,
        or strangers only.

        Callers of other users are disconnected.
        """
        self.lacks_descriptors = False
        for _ in range(_STRANGERS_AT_ONCE):
            try:
                connection, _address = self._socket.accept()
            except OSError as error:
                self.lacks_descriptors = error.errno in _NO_DESCRIPTORS
                return None
            process, user = _read_credentials(connection)
            if user == os.geteuid():
                connection.setblocking(False)
                close_in_children(connection)
                return connection, process
            connection.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def dial(name: str, process: int) -> socket.socket:
    """Return a connection to the MemoryListener `name` of `process`. Raises ExchangeError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(connection)
    try:
        connection.setblocking(False)
        connection.connect(_PREFIX + name)
        found = _read_credentials(connection)
    except (OSError, ValueError) as error:
        connection.close()
        raise ExchangeError(
            f"Processes of one host must reach each other's Unix sockets. Received: {error}. Use "
            f'transport="tcp"'
        ) from error
    if found != (process, os.geteuid()):
        connection.close()
        raise ExchangeError(
            f"Memory is handed to process {process} of user {os.geteuid()} only. Received: process "
            f"{found[0]} "
            f'of user {found[1]}. Run all tasks of a host as one user, or use transport="tcp"'
        )
    return connection


def _read_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return (process, user) of the other end, as this process's namespaces number them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


def send(connection: socket.socket, data: bytes, file: int) -> None:
    """Send `data`, a few bytes, together with a descriptor. Raises ExchangeError."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))
    try:
        sent = connection.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
        if sent != len(data):
            raise OSError("the other process doesn't read")
    except OSError as error:
        raise ExchangeError(
            f"Memory must be handed to the other processes of this host. Received: {error}. Raise the limit "
            f"of "
            'open files (ulimit -n), or use transport="tcp"'
        ) from error


def receive(connection: socket.socket, size: int) -> tuple[bytes, int]:
    """Return (`size` bytes, descriptor) that have been sent together; the caller closes the descriptor.

    Raises BlockingIOError while nothing has arrived, ExchangeError for anything else.
    """
    try:
        data, ancillary, flags, _ = connection.recvmsg(
            size, socket.CMSG_SPACE(_FILES_PER_MESSAGE * 4), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        raise
    except OSError as error:
        raise ExchangeError(f"Memory must be handed over by the other process. Received: {error}") from error
    files = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content[: len(content) // files.itemsize * files.itemsize])
    if len(files) != 1 or len(data) != size or flags & socket.MSG_CTRUNC:
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file)
        raise ExchangeError(
            f"Memory must come as {size} bytes and one descriptor. Received: {len(data)} bytes and "
            f'{len(files)} descriptors. Where a policy of the system forbids it, use transport="tcp"'
        )
    return data, files[0]
