"""One connection: messages out, messages in, never waiting. Both sides use it."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ParameterError
from insitu.exchange import memory
from insitu.parameters.wire import HEADER, MalformedMessage, Message, decode, encode, read_header

_ROOM = 1 << 16
_VIEWS = 16
_SILENT_MS = 1500
"""Milliseconds after which a host that acknowledges nothing is gone."""
_NOTHING = np.empty(0, np.uint8)
PAYLOAD_LIMIT = 64 << 30
"""Bytes of numbers in one message. Peers are the job's own; this keeps nonsense from being allocated."""


class ConnectionClosed(Exception):
    """Internal: the other side has closed, or can't be reached any more."""


class Connection:
    """Messages over one non-blocking TCP connection between peers that have proved themselves.

    `segments` are the pieces of memory that the other side has shown us, by number.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.segments: dict[int, memory.Segment] = {}
        self._shown: dict[int, NDArray[Any]] = {}
        self.views: dict[Any, Any] = {}
        """What was made of the segments before, by whatever its maker likes."""
        self.written: Any = None
        """What was written to the other side's memory before it asked for it: (segment, where, version)."""
        self.context: Any = None
        """Whatever the owner wants to keep with it."""
        self._out: deque[memoryview] = deque()
        self._room = bytearray(_ROOM)
        self._filled = 0
        self._head: tuple[int, int, int, int] | None = None
        self._text = bytearray()
        self._payload: NDArray[Any] = _NOTHING
        self._payload_at = 0
        _watch(connection)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def sending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, message: Message) -> None:
        """Sends what the system takes now, and keeps the rest for `flush`. Raises Ended."""
        self._out.extend(encode(message))
        self.flush()

    def put(self, message: Message) -> None:
        """Keeps a message for `flush`: several go together, and wake the other side once."""
        self._out.extend(encode(message))

    def flush(self) -> None:
        out = self._out
        while out:
            try:
                if len(out) == 1:
                    count = self.socket.send(out[0])
                else:
                    count = self.socket.sendmsg([out[i] for i in range(min(len(out), _VIEWS))])
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            while out and count >= len(out[0]):
                count -= len(out.popleft())
            if count:
                out[0] = out[0][count:]

    def receive(self) -> list[Message]:
        """The messages that are whole by now. Raises Ended, Malformed."""
        messages: list[Message] = []
        while True:
            try:
                if self._payload_at < self._payload.size:
                    view = memoryview(self._payload)[self._payload_at :]  # type: ignore[arg-type]
                    count = self.socket.recv_into(view)
                else:
                    count = self.socket.recv_into(memoryview(self._room)[self._filled :])
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            if not count:
                if messages:
                    return messages
                raise ConnectionClosed("the connection was closed")
            if self._payload_at < self._payload.size:
                self._payload_at += count
                if self._payload_at == self._payload.size:
                    messages.append(self._finish())
            else:
                self._filled += count
                if self._parse(messages):
                    return messages

    def _parse(self, messages: list[Message]) -> bool:
        """Takes all whole messages out of the room. Returns whether nothing is begun."""
        room, at = memoryview(self._room), 0
        while True:
            if self._head is None:
                if self._filled - at < HEADER.size:
                    break
                self._head = read_header(room[at : at + HEADER.size])
                if self._head[3] > PAYLOAD_LIMIT:
                    raise MalformedMessage(f"A message of {self._head[3]} bytes is too large")
                at += HEADER.size
                self._text = bytearray()
            take = min(self._head[2] - len(self._text), self._filled - at)
            self._text += room[at : at + take]
            at += take
            if len(self._text) < self._head[2]:
                break
            if self._head[3]:
                self._payload = np.empty(self._head[3], np.uint8)
                take = min(self._payload.size, self._filled - at)
                self._payload[:take] = np.frombuffer(room[at : at + take], np.uint8)
                self._payload_at = take
                at += take
                if take < self._payload.size:
                    break
            messages.append(self._finish())
        self._room[: self._filled - at] = self._room[at : self._filled]
        self._filled -= at
        return self._filled == 0 and self._head is None

    def _finish(self) -> Message:
        head, payload = self._head, self._payload
        if head is None:
            raise MalformedMessage("A message without a head")
        self._head, self._payload, self._payload_at = None, _NOTHING, 0
        return decode(head[0], head[1], self._text, payload, self._segment)

    def _segment(self, number: int) -> NDArray[Any]:
        if number not in self._shown:
            raise MalformedMessage(f"Segment {number} of shared memory was never shown")
        return self._shown[number]

    def attach(self, number: int, process: int, descriptor: int, size: int) -> None:
        """Maps memory of the process at the other end. Raises ExchangeError."""
        if number in self.segments:
            raise ParameterError(f"Segment {number} of shared memory was shown before")
        segment = memory.attach(process, descriptor, size)
        segment.close_file()
        self.segments[number] = segment
        self._shown[number] = segment.array()

    def close(self) -> None:
        self.socket.close()


def _watch(connection: socket.socket) -> None:
    """Small messages go at once, and a host that vanished is noticed within two seconds."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
