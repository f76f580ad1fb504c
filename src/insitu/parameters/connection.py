"""Sends and receives messages over one non-blocking socket. Workers and servers use it alike."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import ParameterError
from insitu.exchange import (
    Borrower,
    PeerInfo,
    TlsSocket,
    close_in_children,
    is_unreachable,
    memory,
    read_host_timeout,
)
from insitu.parameters.rules import HEADER, MalformedMessage, Message, decode, encode, read_header

_RECEIVE_BYTES = 1 << 16
_BUFFERS_PER_CALL = 16
"""Buffers given to one call of sendmsg."""
_HOST_TIMEOUT = read_host_timeout()
"""Seconds without an acknowledgement after which the host at the other end is lost."""
_NO_PAYLOAD = np.empty(0, np.uint8)
PAYLOAD_LIMIT = 64 << 30
"""Most bytes of numbers in one message: bounds what a wrong header makes the receiver allocate."""


class ConnectionClosed(Exception):
    """Internal: the peer closed the connection, or it failed."""


class Connection:
    """Messages over one TCP connection whose handshake is done. No method waits."""

    def __init__(self, connection: socket.socket, peer_info: PeerInfo | None = None) -> None:
        #: The socket, which this object owns.
        self.socket = connection
        #: The peer's description from the handshake.
        self.peer_info: PeerInfo = peer_info or {}
        #: Return the descriptor of a segment that the peer has handed over, by its number; None: it hasn't.
        #: Set
        #: by the event loop of a server.
        self.take_memory: Callable[[int], int | None] = lambda number: None
        #: Memory of the peer that `attach` mapped, by segment number.
        self.segments: dict[int, memory.Segment] = {}
        #: The right to write to each of them, by the same number.
        self.borrowed: dict[int, Borrower] = {}
        #: Views into `segments` that the owner made and keeps, by a key of its choice.
        self.views: dict[Any, Any] = {}
        #: On a server: the values that the last push wrote to the worker's memory before they were pulled, as
        #: (segment, group offsets, version); None if it wrote none. Set and cleared by `RequestHandler`.
        self.values_written: tuple[Any, Any, int] | None = None
        #: The worker that takes closures by this connection; None before it does. Written by its handler.
        self.closure_worker: int | None = None
        self._segment_arrays: dict[int, NDArray[Any]] = {}
        #: Encoded messages that the system hasn't taken yet.
        self._outgoing: deque[memoryview] = deque()
        #: Bytes received that aren't parsed yet: the first `_received` of `_buffer`.
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._received = 0
        #: Header, JSON and numbers of the message that is being received.
        self._header: tuple[int, int, int, int] | None = None
        self._text = bytearray()
        self._payload: NDArray[Any] = _NO_PAYLOAD
        self._payload_received = 0
        _configure_socket(connection)
        if isinstance(connection, TlsSocket):
            connection.read_ahead = True  # `receive` looks at what it holds
        close_in_children(connection)

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while messages wait to be sent."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Send as much as the system takes now, and keep the rest for `flush`. Raises ConnectionClosed."""
        self._outgoing.extend(encode(message))
        self.flush()

    def enqueue(self, message: Message) -> None:
        """Keep a message for `flush`, so that several are sent in one call and wake the peer once."""
        self._outgoing.extend(encode(message))

    def check_host(self) -> None:
        """Raise ConnectionClosed if the host at the other end acknowledges nothing any more. Call it
        regularly
        while something is awaited."""
        if is_unreachable(self.socket, 1000 * _HOST_TIMEOUT):
            raise ConnectionClosed(f"the host has acknowledged nothing for {_HOST_TIMEOUT:g} s")

    def flush(self) -> None:
        """Send as much of what was enqueued as the system takes. Raises ConnectionClosed."""
        outgoing = self._outgoing
        while outgoing:
            try:
                if len(outgoing) == 1:
                    count = self.socket.send(outgoing[0])
                else:
                    count = self.socket.sendmsg(
                        [outgoing[i] for i in range(min(len(outgoing), _BUFFERS_PER_CALL))]
                    )
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            while outgoing and count >= len(outgoing[0]):
                count -= len(outgoing.popleft())
            if count:
                outgoing[0] = outgoing[0][count:]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived completely. Raises ConnectionClosed, MalformedMessage."""
        messages: list[Message] = []
        while True:
            try:
                if self._payload_received < self._payload.size:
                    view = memoryview(self._payload)[self._payload_received :]  # type: ignore[arg-type]
                    count = self.socket.recv_into(view)
                else:
                    count = self.socket.recv_into(memoryview(self._buffer)[self._received :])
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            if not count:
                if messages:
                    return messages
                raise ConnectionClosed("the connection was closed")
            if self._payload_received < self._payload.size:
                self._payload_received += count
                if self._payload_received == self._payload.size:
                    messages.append(self._finish_message())
            else:
                self._received += count
                if self._parse(messages) and not self._has_buffered():
                    return messages

    def _has_buffered(self) -> bool:
        """Return True if bytes have arrived of which a selector doesn't know."""
        return isinstance(self.socket, TlsSocket) and self.socket.has_buffered

    def _parse(self, messages: list[Message]) -> bool:
        """Move all complete messages out of the buffer. Return whether no message is left begun."""
        buffer, position = memoryview(self._buffer), 0
        while True:
            if self._header is None:
                if self._received - position < HEADER.size:
                    break
                self._header = read_header(buffer[position : position + HEADER.size])
                if self._header[3] > PAYLOAD_LIMIT:
                    raise MalformedMessage(
                        f"A message has at most {PAYLOAD_LIMIT} bytes of numbers. "
                        f"Received: {self._header[3]}, which is too large"
                    )
                position += HEADER.size
                self._text = bytearray()
            count = min(self._header[2] - len(self._text), self._received - position)
            self._text += buffer[position : position + count]
            position += count
            if len(self._text) < self._header[2]:
                break
            if self._header[3]:
                self._payload = _allocate(self._header[3])
                count = min(self._payload.size, self._received - position)
                self._payload[:count] = np.frombuffer(buffer[position : position + count], np.uint8)
                self._payload_received = count
                position += count
                if count < self._payload.size:
                    break
            messages.append(self._finish_message())
        self._buffer[: self._received - position] = self._buffer[position : self._received]
        self._received -= position
        return self._received == 0 and self._header is None

    def _finish_message(self) -> Message:
        header, payload = self._header, self._payload
        if header is None:
            raise MalformedMessage("A message must begin with a header")
        self._header, self._payload, self._payload_received = None, _NO_PAYLOAD, 0
        return decode(header[0], header[1], self._text, payload, self._get_segment)

    def _get_segment(self, number: int) -> NDArray[Any]:
        if number not in self._segment_arrays:
            raise MalformedMessage(f"Shared memory must be attached before it is used. Received: {number}")
        return self._segment_arrays[number]

    def attach(self, number: int, size: int, word: int, grant: int) -> None:
        """Map memory that the peer has handed over as segment `number`; see Borrower for `word` and `grant`.

        Raises ExchangeError, ParameterError.
        """
        file = self.take_memory(number)
        if file is None and number in self.segments:
            return  # the request was sent again
        if file is None:
            raise ParameterError(
                f"Memory must be handed over before a server maps it. Received: nothing for segment "
                f"{number}. Use "
                'transport="tcp"'
            )
        if number in self.segments:
            os.close(file)
            raise ParameterError(f"Each segment can be attached once to a connection. Received: {number}")
        segment = memory.adopt(file, size)
        self.borrowed[number] = Borrower(segment, word, grant)
        self.segments[number] = segment
        self._segment_arrays[number] = segment.array()

    def borrow(self, number: int) -> Borrower:
        """Return the right to write to a segment. Raises ParameterError if nothing is attached."""
        found = self.borrowed.get(number)
        if found is None:
            raise ParameterError(f"Memory must be attached before a message names it. Received: {number}")
        return found

    def close(self) -> None:
        """Close the socket. Unsent messages are lost."""
        self.socket.close()


def _allocate(size: int) -> NDArray[Any]:
    """Return memory for numbers that were announced. The system gives it only as they arrive."""
    try:
        return np.empty(size, np.uint8)
    except MemoryError as error:
        raise MalformedMessage(
            f"A message must fit into memory. Received: an announcement of {size} bytes. Use more servers "
            f"(--ps)"
        ) from error


def _configure_socket(connection: socket.socket) -> None:
    """Send small messages at once, and have the system notice a host that vanishes while nothing is sent."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    # Not TCP_USER_TIMEOUT, which also counts the time for which a peer that computes doesn't read.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(_HOST_TIMEOUT)))
