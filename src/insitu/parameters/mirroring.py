"""Mirrors: each server's state is kept on the next server too, and survives the death of either.

    mirror                            primary
    copy                        ->                      whenever the mirror has no copy
                                <-    snapshot          and from then on, each change in order:
                                <-    change n
    done n                      ->                      only now the worker is answered

When the primary dies, the first worker that notices asks the mirror to `take_over`. It does so only once its
own connection to the primary has closed. Changes that the old primary still sends are refused, so it can't
acknowledge anything any more. A server that is started again first asks the next one to `hand_over` its
state, and is mirrored in turn.

Acknowledged updates are lost only if a server and its mirror both die before either is replaced, or if a
network partition lets workers reach both.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from insitu.base.errors import InputError, InsituError, ServerLost, ServerMoved
from insitu.parameters import checkpoints, snapshots
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.event_loop import EventLoop, HalfState
from insitu.parameters.replication_log import ReplicationLog
from insitu.parameters.request_handler import RequestHandler, describe_bad_request
from insitu.parameters.rules import (
    FAILURE,
    REPLY,
    REQUEST,
    ConsistencyPolicy,
    MalformedMessage,
    Message,
    make_failure,
)
from insitu.parameters.server_handshake import connect_to_server, make_peer_info
from insitu.parameters.server_state import MakeUpdater, ServerState

# Creates the states that a server's process holds: its own, and the one that it mirrors


@dataclass(frozen=True, slots=True)
class StateFactory:
    """The settings of a job's servers that their states depend on."""

    #: The mode and its settings.
    policy: ConsistencyPolicy
    #: "refuse" gradients that aren't finite, or "clip" them.
    nan: str
    #: Makes the updater of a config that workers send.
    make_updater: MakeUpdater
    #: Folder that `Client.checkpoint` wrote to; None: states start empty.
    checkpoint: Path | None
    #: Signs checkpoints, and those that are read; None: this user's key.
    checkpoint_key: bytes | None = field(default=None, repr=False)

    def make(self, server: int) -> ServerState:
        """Return an empty state for a server. Raises InputError for bad settings."""
        return ServerState(server, self.policy, nan=self.nan, make_updater=self.make_updater)

    def restore(self, state: ServerState) -> None:
        """Fill an empty state from its newest checkpoint, if there is one. Raises CheckpointError."""
        if self.checkpoint is None:
            return
        snapshot = checkpoints.read_newest(self.checkpoint, state.server, self.checkpoint_key)
        if snapshot is not None:
            snapshots.restore(state, snapshot)
            snapshots.mark_restored(state)
            _LOG.info("Server %d starts from checkpoint %d", state.server, snapshot.meta["number"])


Role = Literal["starting", "primary", "mirror", "handed over"]
_LOG = logging.getLogger("insitu")
_RETRY_INTERVAL = 0.1
"""Seconds between two attempts to reach the other server."""
_DIAL_TIMEOUT = 2.0
"""Seconds that the other server has to answer one attempt."""
MIRROR_TIMEOUT = 10.0
"""Seconds for which a new primary without a mirror acknowledges nothing, and for which a server that starts
looks for a mirror of its state."""


@dataclass(slots=True)
class HostedServer:
    """The state of one server in this process."""

    #: Handles the requests to the state.
    handler: RequestHandler
    #: Only a primary answers workers.
    role: Role
    #: The server that it was handed over to, while that one has no mirror and so has acknowledged nothing.
    handed_to: Connection | None = None
    #: Requests that came while the role was "starting", in order.
    early: list[tuple[Connection, Message]] = field(default_factory=list)


class MirrorManager:
    """The states that one server's process holds, and its part in mirroring them.

    Used by the event loop's thread alone. It dials other servers in threads of their own.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        backups: int,
        secret: bytes,
        factory: StateFactory,
        stall_timeout: float,
        loop: EventLoop,
    ) -> None:
        #: States by the index of their server.
        self.hosted: dict[int, HostedServer] = {}
        self._index = index
        self._addresses = list(addresses)
        self._backups = backups
        self._secret = secret
        self._factory = factory
        self._stall_timeout = stall_timeout
        self._loop = loop
        self._next = (index + 1) % max(1, len(addresses))
        self._previous = (index - 1) % max(1, len(addresses))
        #: Results of dialling threads: the operation, and the socket or None.
        self._dialled: queue.SimpleQueue[tuple[str, socket.socket | None]] = queue.SimpleQueue()
        #: Operations for which a thread dials.
        self._dialling: set[str] = set()
        #: Time on the monotonic clock before which an operation isn't tried again.
        self._retry_at: dict[str, float] = {}
        #: Operations that another server was asked for and hasn't answered.
        self._requested: dict[Connection, str] = {}
        #: Connection to the server whose state is mirrored here, while it is up.
        self._primary_connection: Connection | None = None
        self._start_empty_at = time.monotonic() + MIRROR_TIMEOUT
        own = self._host(index, "starting" if backups else "primary")
        if not backups:
            factory.restore(own.handler.state)

    def _host(self, server: int, role: Role) -> HostedServer:
        handler = RequestHandler(
            self._factory.make(server),
            self._stall_timeout,
            ReplicationLog(server),
            self._loop.watch_writer,
            self._factory.checkpoint_key,
        )
        self.hosted[server] = HostedServer(handler, role)
        return self.hosted[server]

    def list_primaries(self) -> list[HostedServer]:
        """Return the states that answer workers here."""
        return [hosted for hosted in self.hosted.values() if hosted.role == "primary"]

    # Messages

    def handle(self, connection: Connection, message: Message) -> None:
        """Handle a request, or the answer of another server. Raises MalformedMessage."""
        if message.kind != REQUEST:
            self._handle_answer(connection, message)
            return
        server = message.meta.get("of", self._index)
        operation = message.meta.get("op")
        hosted = self.hosted.get(server) if isinstance(server, int) else None
        try:
            if operation == "attach":
                meta = message.meta
                fields = (int(meta[name]) for name in ("segment", "size", "word", "grant"))
                connection.attach(*fields)
                self._send(connection, Message(REPLY, message.request, {}))
            elif operation in ("copy", "hand_over", "take_over"):
                if operation != "take_over":
                    self._check_server(connection, operation, server)
                getattr(self, f"_{operation}")(connection, message, server, hosted)
            elif message.meta.get("change"):
                self._replicate(connection, message, hosted)
            elif hosted is None or hosted.role in ("mirror", "handed over"):
                raise self._make_moved(server, "this process doesn't host it")
            elif hosted.role == "starting":
                hosted.early.append((connection, message))
            else:
                hosted.handler.handle(connection, message)
        except MalformedMessage:
            raise
        except InsituError as error:
            self._send(connection, make_failure(message.request, error))
        except Exception as error:
            self._send(connection, make_failure(message.request, describe_bad_request(error)))

    def _check_server(self, connection: Connection, operation: str, server: object) -> None:
        """Raise InputError unless the sender is the server to which a state may go: its mirror, or itself."""
        info, count = connection.peer_info, len(self._addresses)
        index = (server + (operation == "copy")) % count if isinstance(server, int) else None
        if not self._backups or info.get("role") != "server" or info.get("index") != index:
            raise InputError(
                f"A state is sent to its own server and to its mirror only (--ps-backups 1). Received: "
                f"{operation!r} of server {server!r:.20} from {info.get('role')} {info.get('index')}. Use "
                f"only "
                "insitu's own clients"
            )

    @staticmethod
    def _send(connection: Connection, message: Message) -> None:
        with contextlib.suppress(ConnectionClosed):  # the loop sees it too, and calls handle_closed
            connection.send(message)

    def _take_over(
        self, connection: Connection, message: Message, server: int, hosted: HostedServer | None
    ) -> None:
        """Become the primary of a state that is mirrored here."""
        if hosted is None or hosted.role == "starting":
            raise ServerLost(
                f"A mirror must hold the state of server {server} to take over: server {self._index} "
                "has nothing of it. Start the job again from a checkpoint",
                server=server,
            )
        if hosted.role == "handed over":
            raise self._make_moved(server, "it is back at its own address")
        if hosted.role == "mirror" and self._primary_connection is not None:
            # The worker is late, or can't reach the primary: the mirror can, so it must not take over.
            raise self._make_moved(server, "it is up, at its own address")
        if hosted.role != "primary":
            _LOG.warning("Parameter server %d takes over from server %d", self._index, server)
            hosted.role = "primary"
        self._send(connection, Message(REPLY, message.request, {}))

    def _copy(
        self, connection: Connection, message: Message, server: int, hosted: HostedServer | None
    ) -> None:
        """Make the server that asks the mirror of a state."""
        if hosted is None or hosted.role != "primary":
            raise self._make_moved(server, "this process isn't ready to serve it")
        self._send_snapshot(connection, message, hosted.handler.state)
        hosted.handler.replication.mirror = connection
        # An empty change: the mirror acknowledges it once it has the snapshot.
        hosted.handler.replication.append(Message(REQUEST, 0, {"op": "noted", "of": server}))

    def _hand_over(
        self, connection: Connection, message: Message, server: int, hosted: HostedServer | None
    ) -> None:
        """Send a state to its own server, which was started again."""
        if hosted is None or hosted.role == "starting":
            self._send(connection, Message(REPLY, message.request, {"held": False}))
            return
        hosted.role, hosted.handed_to = "handed over", connection
        hosted.handler.fail_waiting(self._make_moved(server, "it is back at its own address"))
        self._send_snapshot(connection, message, hosted.handler.state)
        self._retry_at["copy"] = 0.0

    def _send_snapshot(self, connection: Connection, message: Message, state: ServerState) -> None:
        snapshot = snapshots.take_snapshot(state)
        # Copies, as the next update may come before they are sent.
        arrays = [np.array(array) for array in snapshot.arrays.values()]
        meta = {"held": True, "snapshot": snapshot.meta, "names": list(snapshot.arrays)}
        self._send(connection, Message(REPLY, message.request, meta, arrays))

    def _replicate(self, connection: Connection, message: Message, hosted: HostedServer | None) -> None:
        """Make a change that the primary has made."""
        if hosted is None or hosted.role != "mirror":
            raise self._make_moved(message.meta.get("of"), f"server {self._index} isn't its mirror any more")
        try:
            hosted.handler.replicate(connection, message)
        except InsituError:
            raise
        except Exception as error:  # the connection is closed, and the state copied again
            raise MalformedMessage(f"A mirror can't make a change: {error!r}") from error

    # Answers of other servers

    def _handle_answer(self, connection: Connection, message: Message) -> None:
        """Handle a mirror's answer to a change, or the state that another server was asked for."""
        operation = self._requested.pop(connection, None)
        if operation is not None:
            self._receive_state(connection, operation, message)
            return
        for server, hosted in self.hosted.items():
            replication = hosted.handler.replication
            if replication.mirror is connection:
                if message.kind == FAILURE:
                    # The mirror has taken over: nothing may be acknowledged here any more.
                    replication.mirror = None
                    hosted.role = "handed over"
                    hosted.handler.fail_waiting(self._make_moved(server, "its mirror has taken over"))
                else:
                    replication.acknowledge(message.request)

    def _receive_state(self, connection: Connection, operation: str, message: Message) -> None:
        server = self._index if operation == "hand_over" else self._previous
        if message.kind == FAILURE:
            self._retry_later(operation)
            return
        hosted = self.hosted.get(server)
        if operation == "copy":
            if hosted is not None and hosted.role == "primary":
                return
            hosted = self._host(server, "mirror")
            self._primary_connection = connection
        if hosted is None:
            return
        if message.meta["held"]:
            arrays = dict(zip(message.meta["names"], message.arrays, strict=True))
            snapshot = snapshots.Snapshot(message.meta["snapshot"], arrays)
            try:
                snapshots.restore(hosted.handler.state, snapshot)
            except Exception as error:
                if operation == "hand_over":
                    raise HalfState(error) from error
                _LOG.error("The state of server %d can't be mirrored: %s", server, error)
        if operation == "hand_over":
            self._begin_serving(hosted, restored=bool(message.meta["held"]))

    def _begin_serving(self, hosted: HostedServer, *, restored: bool) -> None:
        """Answer the requests to this process's own server from now on."""
        if not restored:
            self._factory.restore(hosted.handler.state)
        hosted.role = "primary"
        hosted.handler.replication.mirror_expected_until = time.monotonic() + MIRROR_TIMEOUT
        early, hosted.early = hosted.early, []
        for connection, message in early:
            self.handle(connection, message)

    # Reaching other servers

    def tick(self, now: float) -> None:
        """Fail what has waited too long, and look for the other servers. Call it regularly."""
        for hosted in self.hosted.values():
            hosted.handler.tick(now)
            hosted.handler.replication.expire(now)
        self._reach_other_servers(now)

    def handle_wake(self) -> None:
        """Take the results of dialling threads."""
        self._reach_other_servers(time.monotonic())

    def _reach_other_servers(self, now: float) -> None:
        while not self._dialled.empty():
            self._request_state(*self._dialled.get())
        if not self._backups:
            return
        own = self.hosted[self._index]
        if own.role == "starting":
            if now >= self._start_empty_at:
                self._begin_serving(own, restored=False)
            else:
                self._dial("hand_over", self._next, now)
        previous = self.hosted.get(self._previous)
        if self._primary_connection is None and (
            previous is None or previous.role in ("mirror", "handed over")
        ):
            self._dial("copy", self._previous, now)

    def _dial(self, operation: str, server: int, now: float) -> None:
        """Dial in a thread, because two servers may dial each other at the same time."""
        busy = operation in self._dialling or operation in self._requested.values()
        if busy or now < self._retry_at.get(operation, 0.0):
            return
        self._dialling.add(operation)
        own_info = make_peer_info("server", self._index)

        def run() -> None:
            opened: socket.socket | None = None
            try:
                deadline = time.monotonic() + _DIAL_TIMEOUT
                opened, _ = connect_to_server(self._addresses[server], self._secret, own_info, deadline)
            except (OSError, InsituError, ValueError) as error:
                _LOG.debug("Server %d can't reach server %d: %s", self._index, server, error)
            self._dialled.put((operation, opened))
            self._loop.wake()

        threading.Thread(target=run, name=f"dial {server}", daemon=True).start()

    def _request_state(self, operation: str, opened: socket.socket | None) -> None:
        self._dialling.discard(operation)
        if opened is None:
            self._retry_later(operation)
            return
        connection = self._loop.adopt(opened)
        self._requested[connection] = operation
        server = self._index if operation == "hand_over" else self._previous
        self._send(connection, Message(REQUEST, 1, {"op": operation, "of": server}))

    def _retry_later(self, operation: str) -> None:
        self._retry_at[operation] = time.monotonic() + _RETRY_INTERVAL

    def handle_closed(self, connection: Connection) -> None:
        """Forget a connection that was closed: of a worker, a mirror or a primary."""
        operation = self._requested.pop(connection, None)
        if operation is not None:
            self._retry_later(operation)
        if self._primary_connection is connection:
            self._primary_connection = None
            self._retry_later("copy")
        for hosted in self.hosted.values():
            hosted.early = [entry for entry in hosted.early if entry[0] is not connection]
            hosted.handler.forget(connection)
            if hosted.handed_to is connection and hosted.role == "handed over":
                hosted.role, hosted.handed_to = "mirror", None
            if hosted.handler.replication.mirror is connection:
                hosted.handler.replication.lose_mirror()

    def _make_moved(self, server: object, reason: str) -> ServerMoved:
        return ServerMoved(
            f"The state of server {server} isn't served here: {reason}. Received: a request to server "
            f"{self._index}. Ask at the server's other address; insitu's clients do so by themselves"
        )
