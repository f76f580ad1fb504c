"""A parameter server: one thread that listens, and answers workers from what it holds."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from insitu.errors import AuthenticationError, InputError, InsituError, ParameterError
from insitu.exchange import handshake
from insitu.exchange.rendezvous import parse_address
from insitu.parameters import checkpoints, snapshots
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.mirroring import MirrorManager
from insitu.parameters.modes import ConsistencyPolicy, Mode
from insitu.parameters.request_handler import RequestHandler
from insitu.parameters.server_handshake import SocketHandshake, card, check_card
from insitu.parameters.server_state import MakeUpdater, ServerState
from insitu.parameters.updaters import make_updater
from insitu.parameters.wire import REQUEST, MalformedMessage, Message

_LOG = logging.getLogger("insitu")
_TICK = 0.25
"""Seconds between two looks at what has waited too long."""
TELL_EVERY = 1.0
"""Seconds between two accounts of what a server holds and has done."""
_CALLERS = 256
"""Handshakes under way at most."""


class ParameterServer:
    """Holds variables and tables, and applies what workers push. See `insitu.parameters` for how.

    `address` is the `host:port` to listen on (port 0: any), bound at once; the attribute of that name says
    where. `index` is this server's among `addresses`, all servers' in order (None: it is the only one).
    `secret` is proved by both sides, never sent. `total_replicas` shards push; see `insitu.parameters.modes`
    for `mode`, `replicas_to_aggregate` and `max_staleness`. `nan` says what becomes of a gradient that isn't
    finite: "refuse", or "clip" to 0. `make_updater` makes the updater of the config that workers send.
    With `backups` 1, what this server holds is mirrored on the next one, and it mirrors the one before.
    `checkpoint` is a folder that `Client.checkpoint` wrote to: what the newest one there holds of this server
    is what it starts with, unless a mirror has it. `stall_timeout` bounds every wait, in seconds. `tell` is
    called by the serving thread with `account()`, each second and once it has ended.

    Either call `serve()`, which returns after `stop()`; or use it as a context manager, and it serves in a
    thread of its own. Raises InputError for what can't be, ParameterError where it can't listen.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        index: int = 0,
        addresses: Sequence[str] | None = None,
        secret: bytes = b"",
        mode: Mode = "async",
        total_replicas: int = 1,
        replicas_to_aggregate: int | None = None,
        max_staleness: int = 4,
        nan: str = "refuse",
        make_updater: MakeUpdater = make_updater,
        backups: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        stall_timeout: float = 600.0,
        tell: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        count = 1 if addresses is None else len(addresses)
        if not 0 <= index < count:
            raise InputError(f"index must be in [0, {count}), the servers' addresses. Received: {index}")
        if backups not in (0, 1) or backups >= count:
            raise InputError(
                f"backups must be 0, or 1 with two servers or more. Received: {backups} with {count}"
            )
        handshake.check_secret(secret)
        rules = ConsistencyPolicy(mode, total_replicas, replicas_to_aggregate, max_staleness)
        ServerState(index, rules, nan=nan)
        self._secret = secret
        self._card = card("server", index)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._tell = tell or (lambda account: None)
        self._told = 0.0

        def make(server: int, changed: Callable[[Message], int | None]) -> RequestHandler:
            holdings = ServerState(server, rules, nan=nan, make_updater=make_updater)
            return RequestHandler(holdings, stall_timeout, changed, self._write_behind)

        self._selector = selectors.DefaultSelector()
        self._listener = _listen(address)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.index = index
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking = threading.RLock()
        """Who wakes mustn't write to what has got the pipe's number since. A signal's handler may."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._greetings: set[SocketHandshake] = set()
        self._connections: set[Connection] = set()
        self._writing: set[Connection] = set()
        """Those with something left that the system didn't take at once."""
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._closed = False
        self._mirrors = MirrorManager(
            index, addresses or [self.address], backups, secret, make, self._adopt, self._wake, self._restore
        )

    # Life

    def serve(self) -> None:
        """Answers until `stop` is called, by another thread or a signal handler."""
        try:
            ticked = time.monotonic()
            while not self._stopping:
                for key, events in self._selector.select(_TICK):
                    key.data(key.fileobj, events)
                now = time.monotonic()
                if now - ticked >= _TICK:
                    ticked = now
                    self._tick(now)
        finally:
            self.close()
            self._tell(self.account())

    def account(self) -> list[dict[str, Any]]:
        """What `Client.stats` tells, of this server and of any other that it has taken over from. Not while
        another thread serves."""
        hosted = [h.service for h in self._mirrors.hosted.values() if h.role == "primary"]
        return [{**service.holdings.describe(), "mirrored": service.mirrored} for service in hosted]

    def start(self) -> ParameterServer:
        """Serves in a thread of its own from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.serve, name=f"ps:{self.index}", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Ends `serve`, and waits for the thread that `start` began. May be called from a signal handler."""
        self._stopping = True
        self._wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None

    def close(self) -> None:
        """Gives the address and all connections back. Called at the end of `serve`."""
        with self._waking:
            if self._closed:
                return
            self._closed = True
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, SocketHandshake):
                key.fileobj.socket.close()
            elif isinstance(key.fileobj, Connection):
                key.fileobj.close()
            elif isinstance(key.fileobj, checkpoints.CheckpointWriter):
                key.fileobj.stop()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_out)
        os.close(self._wake_in)

    def __enter__(self) -> ParameterServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()

    # Connections

    def _wake(self) -> None:
        with self._waking, contextlib.suppress(OSError):
            if not self._closed:
                os.write(self._wake_in, b"x")

    def _woken(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 64)
        self._mirrors.tick(time.monotonic())
        self._attend()

    def _tick(self, now: float) -> None:
        for greeting in [g for g in self._greetings if g.deadline < now]:
            self._hang_up(greeting)
        for hosted in self._mirrors.hosted.values():
            hosted.service.tick(now)
        self._mirrors.tick(now)
        self._attend()
        if now - self._told >= TELL_EVERY:
            self._told = now
            self._tell(self.account())

    def _accept(self, *_: Any) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if len(self._greetings) >= _CALLERS:
            # Strangers who call and say nothing keep nobody out.
            self._hang_up(min(self._greetings, key=lambda greeting: greeting.deadline))
        greeting = SocketHandshake(connection, handshake.accept(self._secret, self._card))
        self._greetings.add(greeting)
        self._selector.register(greeting, selectors.EVENT_READ, self._greet)

    def _greet(self, greeting: Any, events: int) -> None:
        if greeting not in self._greetings:
            return  # hung up on since the system told of it
        try:
            if not greeting.go_on():
                events = selectors.EVENT_WRITE if greeting.sending else selectors.EVENT_READ
                self._selector.modify(greeting, events, self._greet)
                return
            check_card(greeting.card)
        except AuthenticationError as error:
            _LOG.warning("Somebody called server %d and was turned away: %s", self.index, error)
            self._hang_up(greeting)
        except (OSError, InsituError, ValueError) as error:
            _LOG.info("A caller of server %d was turned away: %s", self.index, error)
            self._hang_up(greeting)
        else:
            self._greetings.discard(greeting)
            self._selector.unregister(greeting)
            self._adopt(greeting.socket).context = greeting.card

    def _adopt(self, opened: socket.socket) -> Connection:
        connection = Connection(opened)
        self._selector.register(connection, selectors.EVENT_READ, self._talk)
        self._connections.add(connection)
        return connection

    def _hang_up(self, greeting: SocketHandshake) -> None:
        self._greetings.discard(greeting)
        self._selector.unregister(greeting)
        greeting.socket.close()

    def _talk(self, connection: Any, events: int) -> None:
        if connection not in self._connections:
            return  # ended since the system told of it
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                for message in connection.receive():
                    self._handle(connection, message)
        except ConnectionClosed:
            self._end(connection)
        except MalformedMessage as error:
            _LOG.warning("Server %d hangs up on a peer: %s", self.index, error)
            self._end(connection)
        self._attend()

    def _handle(self, connection: Connection, message: Message) -> None:
        if message.kind == REQUEST:
            self._mirrors.handle(connection, message)
        else:
            self._mirrors.answered(connection, message)

    def _attend(self) -> None:
        """Sends what was answered, and asks to be told when connections with more of it can take that."""
        for connection in list(self._connections):
            if connection.sending or connection in self._writing:
                try:
                    connection.flush()
                except ConnectionClosed:
                    self._end(connection)
                    continue
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.sending != (connection in self._writing):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
            self._selector.modify(connection, events, self._talk)
            (self._writing.add if connection.sending else self._writing.discard)(connection)

    def _end(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._writing.discard(connection)
        self._selector.unregister(connection)
        self._mirrors.ended(connection)
        connection.close()

    # Checkpoints

    def _restore(self, holdings: ServerState) -> None:
        """Puts the newest checkpoint into new holdings, where there is one."""
        if self._checkpoint is None:
            return
        snapshot = checkpoints.newest(self._checkpoint, holdings.server)
        if snapshot is not None:
            snapshots.put(holdings, snapshot)
            snapshots.go_on_from(holdings)
            _LOG.info("Server %d starts from checkpoint %d", holdings.server, snapshot.meta["number"])

    def _write_behind(
        self, writing: checkpoints.CheckpointWriter, done: Callable[[InsituError | None], None]
    ) -> None:
        """Has the loop look at a checkpoint that is being written."""

        def ready(*_: Any) -> None:
            self._selector.unregister(writing)
            done(writing.end())
            self._attend()

        self._selector.register(writing, selectors.EVENT_READ, ready)


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address, lowest=0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ParameterError(f"A parameter server can't listen on {address}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
