"""The sockets of one server's process: accepts and authenticates peers, receives requests, sends answers."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from insitu.errors import AuthenticationError, InsituError, ParameterError
from insitu.exchange import PeerInfo, handshake, parse_address
from insitu.parameters.checkpoints import CheckpointWriter
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.rules import MalformedMessage, Message
from insitu.parameters.server_handshake import SocketHandshake, check_peer_info, make_peer_info

_LOG = logging.getLogger("insitu")
_MAX_HANDSHAKES = 256
"""Most handshakes under way; the oldest is closed for a new one."""


class MessageHandler(Protocol):
    """Takes the events of a loop; implemented by `MirrorManager`."""

    def handle(self, connection: Connection, message: Message) -> None:
        """Take a message. Raises MalformedMessage, after which the connection is closed."""

    def handle_closed(self, connection: Connection) -> None:
        """Forget a connection, which is closed now."""

    def handle_wake(self) -> None:
        """Do what `wake` was called for."""


class EventLoop:
    """The sockets of one server's process. One thread polls; any thread, and signal handlers, may wake it."""

    def __init__(self, address: str, index: int, secret: bytes) -> None:
        """Listen on `address`. Raises ParameterError where that can't be done."""
        self._index = index
        self._secret = secret
        self._peer_info = make_peer_info("server", index)
        self._handler: MessageHandler | None = None
        self._listener = _listen(address)
        #: The address that is listened on, with its real port.
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: Held while the pipe is written to or closed, so that `wake` never writes to a descriptor that has
        #: been closed and given to another file. Re-entrant, as a signal handler may interrupt `wake`.
        self._wake_lock = threading.RLock()
        self._closed = False
        self._handshakes: set[SocketHandshake] = set()
        self._connections: set[Connection] = set()
        #: Connections that the selector watches for becoming writable.
        self._awaiting_write: set[Connection] = set()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wake_pipe)

    def set_handler(self, handler: MessageHandler) -> None:
        """Give all events to `handler` from now on. Call it before the first `poll`."""
        self._handler = handler

    def poll(self, seconds: float) -> None:
        """Wait for events up to `seconds`, and handle them."""
        for key, events in self._selector.select(seconds):
            key.data(key.fileobj, events)

    def wake(self) -> None:
        """Have the polling thread call `handle_wake` soon."""
        with self._wake_lock, contextlib.suppress(OSError):
            if not self._closed:
                os.write(self._wake_in, b"x")

    def _drain_wake_pipe(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 64)
        if self._handler is not None:
            self._handler.handle_wake()
        self.flush()

    # Handshakes

    def _accept(self, *_: Any) -> None:
        try:
            opened, _ = self._listener.accept()
        except OSError:
            return
        opened.setblocking(False)
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            # Peers that connect and stay silent must not keep others out.
            self._close_handshake(min(self._handshakes, key=lambda pending: pending.deadline))
        socket_handshake = SocketHandshake(opened, handshake.accept(self._secret, self._peer_info))
        self._handshakes.add(socket_handshake)
        self._selector.register(socket_handshake, selectors.EVENT_READ, self._advance_handshake)

    def _advance_handshake(self, socket_handshake: Any, events: int) -> None:
        if socket_handshake not in self._handshakes:
            return  # closed since the selector reported it
        try:
            if not socket_handshake.advance():
                events = selectors.EVENT_WRITE if socket_handshake.has_unsent else selectors.EVENT_READ
                self._selector.modify(socket_handshake, events, self._advance_handshake)
                return
            check_peer_info(socket_handshake.peer_info)
        except AuthenticationError as error:
            _LOG.warning("Server %d refused a peer without the job's secret: %s", self._index, error)
            self._close_handshake(socket_handshake)
        except (OSError, InsituError, ValueError) as error:
            _LOG.info("Server %d refused a peer: %s", self._index, error)
            self._close_handshake(socket_handshake)
        else:
            self._handshakes.discard(socket_handshake)
            self._selector.unregister(socket_handshake)
            self.adopt(socket_handshake.socket, socket_handshake.peer_info)

    def _close_handshake(self, socket_handshake: SocketHandshake) -> None:
        self._handshakes.discard(socket_handshake)
        self._selector.unregister(socket_handshake)
        socket_handshake.socket.close()

    def expire_handshakes(self, now: float) -> None:
        """Close the handshakes that have taken too long."""
        for expired in [h for h in self._handshakes if h.deadline < now]:
            self._close_handshake(expired)

    # Connections

    def adopt(self, opened: socket.socket, peer_info: PeerInfo | None = None) -> Connection:
        """Return a connection over a socket whose handshake is done, and receive its messages from now on."""
        connection = Connection(opened, peer_info)
        self._selector.register(connection, selectors.EVENT_READ, self._handle_events)
        self._connections.add(connection)
        return connection

    def _handle_events(self, connection: Any, events: int) -> None:
        if connection not in self._connections or self._handler is None:
            return  # closed since the selector reported it
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                for message in connection.receive():
                    self._handler.handle(connection, message)
        except ConnectionClosed:
            self._close_connection(connection)
        except MalformedMessage as error:
            _LOG.warning("Server %d closes the connection of a peer: %s", self._index, error)
            self._close_connection(connection)
        self.flush()

    def flush(self) -> None:
        """Send what was enqueued on any connection, and watch those that can't take all of it."""
        for connection in list(self._connections):
            if connection.has_unsent or connection in self._awaiting_write:
                try:
                    connection.flush()
                except ConnectionClosed:
                    self._close_connection(connection)
                    continue
                self._watch_for_write(connection)

    def _watch_for_write(self, connection: Connection) -> None:
        if connection.has_unsent != (connection in self._awaiting_write):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
            self._selector.modify(connection, events, self._handle_events)
            (self._awaiting_write.add if connection.has_unsent else self._awaiting_write.discard)(connection)

    def _close_connection(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._awaiting_write.discard(connection)
        self._selector.unregister(connection)
        if self._handler is not None:
            self._handler.handle_closed(connection)
        connection.close()

    # Checkpoints

    def watch_writer(self, writer: CheckpointWriter, done: Callable[[InsituError | None], None]) -> None:
        """Call `done` with the writer's error, or None, once its checkpoint is written."""

        def finish(*_: Any) -> None:
            self._selector.unregister(writer)
            done(writer.join())
            self.flush()

        self._selector.register(writer, selectors.EVENT_READ, finish)

    def close(self) -> None:
        """Close the listener and all connections, and cancel checkpoints that are being written."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, SocketHandshake):
                key.fileobj.socket.close()
            elif isinstance(key.fileobj, Connection):
                key.fileobj.close()
            elif isinstance(key.fileobj, CheckpointWriter):
                key.fileobj.cancel()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_out)
        os.close(self._wake_in)


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address, lowest=0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ParameterError(
            f"A parameter server can't listen on {address}: {error.strerror}. Give an address of this host "
            "with a free port, or port 0 for any"
        ) from error
    listener.setblocking(False)
    return listener
