"""Closes sockets in forked children: one that kept them open would hide this process's death from its
peers."""

from __future__ import annotations

import os
import socket
import weakref

_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The sockets of this process that its children must not keep."""


def close_in_children(connection: socket.socket) -> None:
    """Have children that are forked from now on close a socket."""
    _OPEN.add(connection)


def _close_all() -> None:
    for connection in list(_OPEN):
        connection.close()


os.register_at_fork(after_in_child=_close_all)
