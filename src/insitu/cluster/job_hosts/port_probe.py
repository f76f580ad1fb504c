"""Finds out whether tasks of two hosts could talk: on a port as theirs, before any is started."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from insitu.base.net.ports import format_address, hold_port
from insitu.cluster.wire import PROBE_BYTES, find_lost_packets
from insitu.exchange import connect_within, parse_address

CONNECT_SECONDS = 5.0
_AT_ONCE = 32
_BACKLOG = 128


class PortProbe:
    """Listens as a task would, and tries to reach others that do."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, host: str) -> str:
        """Listen at a port of `host` until `close`. Returns the address. Raises ClusterError, OSError."""
        self.close()
        self._listener = hold_port(host)
        self._listener.listen(_BACKLOG)
        return format_address(host, self._listener.getsockname()[1])

    def find_unreachable(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Return why addresses can't be reached, by the same keys; those that can are left out."""
        if not addresses:
            return {}
        with ThreadPoolExecutor(min(_AT_ONCE, len(addresses))) as threads:
            reasons = threads.map(_try, addresses.values())
            return {name: reason for name, reason in zip(addresses, reasons, strict=True) if reason}

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None


def _try(address: str) -> str:
    try:
        with contextlib.closing(connect_within(*parse_address(address), CONNECT_SECONDS)) as connection:
            why = find_lost_packets(connection, bytes(PROBE_BYTES), CONNECT_SECONDS)
    except OSError as error:
        why = error.strerror or str(error)
    return f"{address}: {why}" if why else ""
