"""Messages between a job's supervisor and its controller: JSON objects, one a line, over a socket pair."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]
_CHUNK = 1 << 16


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One side. Sending never waits for the other to read: what doesn't fit now goes with a later call."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._incoming = b""
        self._outgoing = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ChannelClosed."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Sends what waits; True once nothing does."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed from error
        return True

    def receive(self) -> list[Message]:
        """The messages that have come, without waiting. Raises ChannelClosed once there will be none."""
        closed = False
        while not closed:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            closed = not data
            self._incoming += data
        *lines, self._incoming = self._incoming.split(b"\n")
        if closed and not lines:
            raise ChannelClosed
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


def open_channel_pair() -> tuple[Channel, Channel]:
    first, second = socket.socketpair()
    return Channel(first), Channel(second)
