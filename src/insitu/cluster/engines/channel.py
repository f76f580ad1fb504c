"""Messages between two processes: JSON objects, one a line, over a connected stream socket."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]
_CHUNK = 1 << 16
_MAX_READS = 16
"""Reads per `receive`: a peer that sends without end doesn't keep the receiver from its other work."""


class ChannelClosed(Exception):
    """The other side is gone, or doesn't send messages."""


class Channel:
    """One side. Sending never waits for the other to read: what doesn't fit now goes with a later call.

    With `max_line_bytes`, a peer that sends a longer line is cut off.
    """

    def __init__(self, connection: socket.socket, max_line_bytes: int | None = None) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._max_line_bytes = max_line_bytes
        self._incoming = b""
        self._outgoing = b""
        self._broken = False

    @property
    def connection(self) -> socket.socket:
        """The socket, to ask the system about."""
        return self._socket

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait until the other side reads."""
        return len(self._outgoing)

    @property
    def has_buffered(self) -> bool:
        """True if bytes have been received that don't make the descriptor readable again."""
        return bool(getattr(self._socket, "has_buffered", False))

    def send(self, message: Message) -> None:
        """Raise ChannelClosed."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what waits; True once nothing does. Raises ChannelClosed."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed from error
        return True

    def receive(self) -> list[Message]:
        """Return the messages that have come; doesn't wait. Raises ChannelClosed once there will be none."""
        for _ in range(_MAX_READS):
            if self._broken:
                break
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._broken = not data
            self._incoming += data
            if self._max_line_bytes is not None and len(self._incoming) > self._max_line_bytes:
                break
        *lines, self._incoming = self._incoming.split(b"\n")
        messages = self._decode(lines)
        if self._max_line_bytes is not None and len(self._incoming) > self._max_line_bytes:
            self._broken = True
        if self._broken and not messages:
            raise ChannelClosed
        return messages

    def _decode(self, lines: list[bytes]) -> list[Message]:
        """Return the messages up to the first line that is none."""
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._broken = True
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()

    def shut_down(self) -> None:
        """End the connection, also where another process has its descriptor."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def open_channel_pair() -> tuple[Channel, Channel]:
    first, second = socket.socketpair()
    return Channel(first), Channel(second)
