"""Warns once that numbers leave this host unencrypted."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import socket

_LOG = logging.getLogger("insitu")


def warn_about_plain_text(connection: socket.socket) -> None:
    """Log a warning, once per process, if a connection leads to another host."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        host = connection.getpeername()[0]
        own = connection.getsockname()[0]
        if host != own and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _warn_once()


@functools.cache
def _warn_once() -> None:
    _LOG.warning(
        "[insitu] Numbers between hosts go unencrypted, as INSITU_TLS=never asks, and who can change packets "
        "on the way can change them. Leave INSITU_TLS out, unless only these hosts share the network "
        "(docs/security.md)."
    )
