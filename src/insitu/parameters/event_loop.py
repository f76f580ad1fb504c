"""The sockets of one server's process: accepts and authenticates peers, receives requests, sends answers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from insitu.base.errors import AuthenticationError, InsituError, ParameterError
from insitu.base.net import ports
from insitu.exchange import (
    PeerInfo,
    SocketHandshake,
    close_in_children,
    parse_address,
    read_tls_settings,
    resolve,
)
from insitu.parameters.checkpoints import CheckpointWriter
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.memory_receiver import MemoryReceiver
from insitu.parameters.rules import MalformedMessage, Message
from insitu.parameters.server_handshake import HANDSHAKE_TIMEOUT, check_peer_info, make_peer_info

_LOG = logging.getLogger("insitu")
_MAX_HANDSHAKES = 256
"""Most handshakes under way; the oldest is closed for a new one."""
_BACKLOG = 128
_ACCEPTS_PER_TURN = 16
_CALLERS_SHARE, _CALLERS_SECONDS = 0.05, 1.0
"""Callers that haven't proved anything get this share of the thread's time, or so many seconds at once: more
would be taken from training."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` after which the caller still waits: the listener would be ready again at once."""
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting after such an error."""
_NAME_TIMEOUT = 30.0
"""Seconds within which a name server must say where this host's own name is."""
_LOG_INTERVAL = 1.0
"""Seconds between two log lines about peers that were refused."""


class HalfState(Exception):
    """Internal: a state could only be taken over in part. It must not be served, so the process ends."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        #: The reason.
        self.error = error


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
        """Listen on `address`. Raises ParameterError if that can't be done."""
        self._index = index
        self._secret = secret
        self._tls_settings = read_tls_settings()
        self._handler: MessageHandler | None = None
        self._listener = _listen(address)
        self._memory = MemoryReceiver()
        self._peer_info = make_peer_info("server", index, memory=self._memory.name)
        #: The address that is listened on, with its real port.
        self.address = ports.format_address(*self._listener.getsockname()[:2])
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: Held while the pipe is written to or closed, so that `wake` never writes to a descriptor that has
        #: been closed and given to another file. Re-entrant, as a signal handler may interrupt `wake`.
        self._wake_lock = threading.RLock()
        self._closed = False
        self._handshakes: set[SocketHandshake] = set()
        #: Peers that were refused.
        self._refused = 0
        #: Time on the monotonic clock before which no refusal is logged.
        self._log_at = 0.0
        #: Time on the monotonic clock before which no caller is accepted; 0.0: the listeners are watched.
        self._accept_at = 0.0
        self._callers_budget = TimeBudget(_CALLERS_SHARE, _CALLERS_SECONDS, time.monotonic())
        self._connections: set[Connection] = set()
        #: Connections that the selector watches for becoming writable.
        self._awaiting_write: set[Connection] = set()
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wake_pipe)
        self._watch_listeners()

    def set_handler(self, handler: MessageHandler) -> None:
        """Give all events to `handler` from now on. Call it before the first `poll`."""
        self._handler = handler

    def poll(self, seconds: float) -> None:
        """Wait for events up to `seconds`, and handle them."""
        if self._accept_at:
            left = self._accept_at - time.monotonic()
            if left <= 0:
                self._watch_listeners()
            else:
                seconds = min(seconds, left)
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

    def _watch_listeners(self) -> None:
        self._accept_at = 0.0
        self._selector.register(self._listener, selectors.EVENT_READ, self._serve_callers(self._accept))
        if self._memory.name:
            receive = self._serve_callers(lambda *_: self._receive_memory())
            self._selector.register(self._memory, selectors.EVENT_READ, receive)

    def _serve_callers(self, serve: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """Return `serve`, which anybody can cause, with its time entered in the budget."""

        def serve_within_budget(ready: Any, events: int) -> None:
            began = time.thread_time()
            serve(ready, events)
            seconds = self._callers_budget.spend(time.thread_time() - began, time.monotonic())
            if seconds > 0:
                self._pause_accepting(seconds)

        return serve_within_budget

    def _pause_accepting(self, seconds: float) -> None:
        """Leave callers waiting for so long."""
        if not self._accept_at:
            self._selector.unregister(self._listener)
            if self._memory.name:
                self._selector.unregister(self._memory)
        self._accept_at = max(self._accept_at, time.monotonic() + seconds)

    def _receive_memory(self) -> None:
        self._memory.receive()
        if self._memory.lacks_descriptors:
            self._pause_accepting(_ACCEPT_PAUSE)

    def _accept(self, *_: Any) -> None:
        for _turn in range(_ACCEPTS_PER_TURN):
            try:
                opened, _address = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    # Close a silent one, too.
                    self._log_refusal(error)
                    self._pause_accepting(_ACCEPT_PAUSE)
                    if self._handshakes:
                        self._close_handshake(min(self._handshakes, key=lambda pending: pending.deadline))
                return
            opened.setblocking(False)
            close_in_children(opened)
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                # Peers that connect and stay silent must not keep others out.
                self._close_handshake(min(self._handshakes, key=lambda pending: pending.deadline))
            until = time.monotonic() + HANDSHAKE_TIMEOUT
            pending = SocketHandshake(
                opened, self._secret, self._peer_info, self._tls_settings, dialled=False, deadline=until
            )
            self._handshakes.add(pending)
            self._selector.register(
                pending, selectors.EVENT_READ, self._serve_callers(self._advance_handshake)
            )

    def _advance_handshake(self, socket_handshake: Any, events: int) -> None:
        if socket_handshake not in self._handshakes:
            return  # closed since the selector reported it
        try:
            if not socket_handshake.advance():
                serve = self._serve_callers(self._advance_handshake)
                self._selector.modify(socket_handshake, socket_handshake.events, serve)
                return
            check_peer_info(socket_handshake.peer_info)
        except (OSError, InsituError, ValueError) as error:
            self._log_refusal(error)
            socket_handshake.send_answer(error)
            self._close_handshake(socket_handshake)
        else:
            self._handshakes.discard(socket_handshake)
            self._selector.unregister(socket_handshake)
            self.adopt(socket_handshake.socket, socket_handshake.peer_info)

    def _log_refusal(self, error: Exception) -> None:
        """Log why a peer was refused, but not more often than once in _LOG_INTERVAL: strangers could fill the
        disk."""
        self._refused += 1
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + _LOG_INTERVAL
            level = logging.WARNING if isinstance(error, AuthenticationError) else logging.INFO
            _LOG.log(level, "Server %d refused a peer (%d so far): %s", self._index, self._refused, error)

    def _close_handshake(self, socket_handshake: SocketHandshake) -> None:
        self._handshakes.discard(socket_handshake)
        self._selector.unregister(socket_handshake)
        socket_handshake.socket.close()

    def expire_handshakes(self, now: float) -> None:
        """Close the handshakes that have taken too long."""
        for expired in [h for h in self._handshakes if h.deadline < now]:
            self._close_handshake(expired)
        self._memory.expire(now)

    def check_hosts(self) -> None:
        """Close the connections to hosts that have vanished. Call it regularly."""
        for connection in list(self._connections):
            try:
                connection.check_host()
            except ConnectionClosed:
                self._close_connection(connection)

    # Connections

    def adopt(self, opened: socket.socket, peer_info: PeerInfo | None = None) -> Connection:
        """Return a connection over a socket whose handshake is done, and receive its messages from now on."""
        connection = Connection(opened, peer_info)
        ticket, process = str(connection.peer_info.get("ticket")), connection.peer_info.get("process")
        if isinstance(process, int):
            connection.take_memory = lambda number: self._memory.take(ticket, process, number)
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
        except HalfState as half:
            raise half.error from half
        except Exception as error:
            # No message ends a server. Its sender, which nobody can answer any more, connects again.
            _LOG.exception("Server %d closes the connection of a peer: %r", self._index, error)
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
        self._memory.close()
        ports.stop_listening(self._listener)
        self._listener.close()
        os.close(self._wake_out)
        os.close(self._wake_in)


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address, lowest=0)
    try:
        listener = ports.take_inherited(host, port)
        if listener is None:
            found = resolve(host, port, _NAME_TIMEOUT)[0]
            listener = socket.create_server(found.address[:2], family=found.family, backlog=_BACKLOG)
        else:
            listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ParameterError(
            f"A parameter server can't listen on {address}: {reason}. Give an address of this host "
            "with a free port, or port 0 for any"
        ) from error
    listener.setblocking(False)
    close_in_children(listener)
    return listener


# Pure: how much of a thread's time goes to work that anybody can cause


class TimeBudget:
    """Seconds that may be spent: a share of all time, and some at once after a quiet time."""

    def __init__(self, share: float, most: float, now: float) -> None:
        """`most`: seconds at once, which are there at the start."""
        self._share = share
        self._most = most
        #: Seconds that may be spent at the time `_at`; below 0 after too much was.
        self._left = most
        self._at = now

    def spend(self, seconds: float, now: float) -> float:
        """Note that `seconds` were spent until `now`. Return for how many seconds nothing may be, from now
        on."""
        self._left = min(self._most, self._left + self._share * (now - self._at)) - seconds
        self._at = now
        return max(0.0, -self._left / self._share)
