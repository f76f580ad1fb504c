"""A worker's requests to all servers. The thread that waits for a result does the I/O for all requests."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from insitu.base.errors import (
    AuthenticationError,
    InsituError,
    ParameterError,
    ServerLost,
    ServerMoved,
    ServerStalled,
)
from insitu.exchange import Lender
from insitu.parameters.connection import ConnectionClosed
from insitu.parameters.futures import Future, gather
from insitu.parameters.rules import Array, BufferRef, MalformedMessage, Message
from insitu.parameters.server_connection import DENSE_LANE, ServerConnection
from insitu.parameters.worker_buffers import LentMemory

_MAX_POLL = 0.05
"""Most seconds of one poll of the connections."""
_RECONNECT_TIMEOUT = 1.0
"""Seconds for which a new request looks for a server that was lost and not found before."""
_CLOSE_TIMEOUT = 0.5
"""Seconds for which a client that is closed waits for servers to end their writes."""
_CHECK_INTERVAL = 0.25
"""Seconds between two looks whether the hosts of servers are there."""
_RETRY_INTERVAL = 0.002
"""Seconds between two attempts to find a lost server, or to take the I/O over from a waiting thread."""


class ServerRequests:
    """Sends requests to all servers and receives their answers. Several threads may use it."""

    def __init__(self, connections: Sequence[ServerConnection], timeout: float, stall_timeout: float) -> None:
        """`timeout` bounds how long a lost server is looked for, `stall_timeout` how long an answer may take,
        both in seconds."""
        #: One for each server, in the order of their indices.
        self.connections = list(connections)
        #: Held while a connection is used, but not while waiting for one.
        self.lock = threading.RLock()
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._closed = False
        #: Time on the monotonic clock before which hosts aren't checked again.
        self._check_at = 0.0
        #: Threads that wait for a result and therefore do the I/O.
        self._waiting_threads = 0
        #: (operation, meta) of the requests that define the model, for a server that is found again.
        self._definitions: list[tuple[str, Mapping[str, Any]]] = []
        #: Memory that servers of this host map, in the order of lending.
        self._memories: list[LentMemory] = []
        self._has_background_work = threading.Event()
        self._io_thread: threading.Thread | None = None

    # Requests

    def request(
        self,
        connection: ServerConnection,
        operation: str,
        meta: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        lane: int = DENSE_LANE,
        refs: Sequence[BufferRef | None] = (),
        defer_send: bool = False,
    ) -> Future[Any]:
        """Send a request to one server; see `ServerConnection.submit`. The result is the answer's Message."""
        future: Future[Any] = Future(self.run_until_done)
        with self.lock:
            if self._closed:
                raise ParameterError("A client can't be used once it is closed. Call connect() for a new one")
            connection.submit(future, operation, meta, arrays, lane=lane, refs=refs, defer_send=defer_send)
            if connection.has_unsent and not defer_send:
                self.start_background_io()
        return future

    def share(self, memory: LentMemory) -> None:
        """Have the servers of this host map `memory`, now and whenever one is found again. It is closed with
        the client. Raises ExchangeError."""
        self._memories.append(memory)
        near = [connection for connection in self.connections if memory.is_shared_with(connection)]
        futures = [self._attach(c, memory, memory.lender) for c in near if memory.lender is not None]
        gather(futures, self.run_until_done, list).result()

    def _attach(self, connection: ServerConnection, memory: LentMemory, lender: Lender) -> Future[Any]:
        with self.lock:
            if connection.lanes:  # else `_reintroduce` hands it over
                connection.hand_over(memory.LANE, memory.SEGMENT, memory.descriptor)
            grant = lender.grant(connection.server)
            meta = {"segment": memory.SEGMENT, "size": memory.shared_size, **grant}
            return self.request(connection, "attach", meta, lane=memory.LANE)

    def request_each(
        self,
        operation: str,
        metas: Sequence[Mapping[str, Any]],
        arrays: Sequence[Sequence[Array]],
        lane: int = DENSE_LANE,
        defer_send: bool = False,
    ) -> Future[list[Message]]:
        """Send each server its own request. The result is the list of their answers."""
        futures = [
            self.request(connection, operation, meta, parts, lane, defer_send=defer_send)
            for connection, meta, parts in zip(self.connections, metas, arrays, strict=True)
        ]
        return gather(futures, self.run_until_done, list)

    def request_all(
        self, operation: str, meta: Mapping[str, Any], lane: int = DENSE_LANE
    ) -> Future[list[Message]]:
        """Send all servers the same request, without arrays. The result is the list of their answers."""
        count = len(self.connections)
        return self.request_each(operation, [meta] * count, [()] * count, lane)

    def request_suspects_first(
        self, send: Sequence[Callable[[], Future[Any]]], suspects: Collection[int]
    ) -> Future[list[Any]]:
        """Send one change to all servers so that all make it or none.

        `send[i]()` sends server i its part, which `suspects` may refuse. These are asked, and waited for,
        before any other server makes the change.
        """
        sent: dict[int, Future[Any]] = {}
        for server in sorted(range(len(send)), key=lambda server: server not in suspects):
            sent[server] = send[server]()
            if server in suspects:
                try:
                    sent[server].result()
                except InsituError:
                    return sent[server]
        return gather([sent[server] for server in range(len(send))], self.run_until_done, list)

    # I/O

    def run_until_done(self, future: Future[Any], timeout: float | None) -> None:
        """Do the I/O of all connections until `future` is done.

        Raises ServerStalled after `timeout` seconds (None: the stall timeout).
        """
        seconds = self._stall_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        self._waiting_threads += 1
        try:
            while not future.done():
                self._poll(min(_MAX_POLL, max(0.0, deadline - time.monotonic())))
                if time.monotonic() >= deadline and not future.done():
                    silent = [f"{c.server} at {c.address}" for c in self.connections if c.pending]
                    raise ServerStalled(
                        f"Parameter servers must answer within {seconds:g} s. Received: nothing from server "
                        f"{', '.join(silent)}. Look into its log, or raise --stall-timeout"
                    )
        finally:
            self._waiting_threads -= 1

    def start_background_io(self) -> None:
        """Do I/O from now on also while no thread waits for a result.

        Needed for requests that are made in two steps and for bytes that the system doesn't take at once.
        Costs a thread, so it isn't started before.
        """
        if self._io_thread is None:
            self._io_thread = threading.Thread(
                target=self._run_background_io, name="parameter client", daemon=True
            )
            self._io_thread.start()
        self._has_background_work.set()

    def _run_background_io(self) -> None:
        while not self._closed:
            self._has_background_work.wait()
            if not any(connection.pending for connection in self.connections):
                self._has_background_work.clear()
            elif self._waiting_threads:
                time.sleep(_RETRY_INTERVAL)
            else:
                self._poll(_MAX_POLL)

    def _poll(self, seconds: float) -> None:
        """Wait for any connection once, then send and receive. Holds the lock only outside of the wait."""
        poll = select.poll()
        lanes = {}
        with self.lock:
            for server in self.connections:
                if server.pending and not server.lanes:
                    self._reconnect(server, max(_RECONNECT_TIMEOUT, 3 * server.seconds_to_connect))
                for lane, connection in enumerate(server.lanes):
                    lanes[connection.fileno()] = (server, lane, connection)
                    events = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
                    poll.register(connection, events)
        ready = poll.poll(seconds * 1000)
        if not ready:
            self._check_hosts()
        for file, events in ready:
            server, lane, connection = lanes[file]
            with self.lock:
                if lane < len(server.lanes) and server.lanes[lane] is connection:
                    self._handle_events(server, lane, events)

    def _check_hosts(self) -> None:
        """Look for another address of each server whose host has vanished."""
        with self.lock:
            if time.monotonic() < self._check_at:
                return
            self._check_at = time.monotonic() + _CHECK_INTERVAL
            for server in self.connections:
                try:
                    for connection in server.lanes:
                        connection.check_host()
                except ConnectionClosed:
                    self._reconnect(server, self._timeout)

    def _handle_events(self, server: ServerConnection, lane: int, events: int) -> None:
        try:
            if events & select.POLLOUT:
                server.lanes[lane].flush()
            if events & ~select.POLLOUT:
                server.receive(lane)
        except (ConnectionClosed, MalformedMessage):
            self._reconnect(server, self._timeout)

    # Lost servers

    def limit_search(self, seconds: float) -> None:
        """Look for a lost server for at most `seconds` from now on."""
        self._timeout = min(self._timeout, seconds)

    def remember_definition(self, operation: str, meta: Mapping[str, Any]) -> None:
        """Keep a request that defines the model, to be repeated to a server that is found again."""
        self._definitions.append((operation, meta))

    def _reconnect(self, server: ServerConnection, seconds: float) -> None:
        """Find a lost server again and resend its unanswered requests; fail these if it isn't found."""
        server.disconnect()
        try:
            self.take_memory_back(server, seconds)
            self._find_again(server, seconds)
        except InsituError as error:
            server.fail_pending(error)
        else:
            server.resend_pending()

    def take_memory_back(self, server: ServerConnection, timeout: float) -> None:
        """Take back memory lent to a server: if it was stopped and resumes, it can't write to it any more.

        Raises ExchangeError if it is in the middle of a write for longer than `timeout` seconds.
        """
        for memory in self._memories:
            if memory.lender is not None:
                memory.lender.take_back(server.server, timeout)

    def _find_again(self, server: ServerConnection, seconds: float) -> None:
        """Connect to a lost server, at its own address or its mirror's.

        Raises ServerLost if it isn't found within `seconds`, or has lost its state.
        """
        deadline = time.monotonic() + seconds
        if self._closed:
            raise ParameterError("A client can't be used once it is closed. Call connect() for a new one")
        while True:
            try:
                server.connect_once(deadline)
                self._reintroduce(server, deadline)
                return
            except (ConnectionClosed, OSError, ServerMoved, AuthenticationError) as error:
                server.use_next_address()
                reason = str(error)
            if time.monotonic() >= deadline:
                raise ServerLost(
                    f"Parameter server {server.server} was lost and isn't found again at {server.address}. "
                    f"Received: {reason}. Start it again, or run with --ps-backups 1, so that a mirror "
                    "takes over",
                    server=server.server,
                )
            time.sleep(_RETRY_INTERVAL)

    def _reintroduce(self, server: ServerConnection, deadline: float) -> None:
        """Repeat to a server that was found again what it must know of this worker.

        Raises ServerLost if it has lost its state.
        """
        for operation, meta in self._definitions:
            answer = server.call(operation, meta, deadline)
            if operation == "define" and not answer.meta["initialised"]:
                raise ServerLost(
                    f"Parameter server {server.server} at {server.address} was started again, without "
                    "what it held: it has no mirror (--ps-backups 1) and no checkpoint to start from. Start "
                    "the job again with one of them",
                    server=server.server,
                )
        for memory in self._memories:
            if memory.is_shared_with(server) and memory.lender is not None:
                grant, size = memory.lender.grant(server.server), memory.shared_size
                server.attach(memory.LANE, memory.SEGMENT, memory.descriptor, size, grant, deadline)
            else:
                memory.inline_pending(server)

    def close(self) -> None:
        """Close all connections. Requests under way fail."""
        with self.lock:
            self._closed = True
            self._has_background_work.set()
            for connection in self.connections:
                connection.close()
                with contextlib.suppress(InsituError):
                    self.take_memory_back(connection, _CLOSE_TIMEOUT)
        if self._io_thread is not None and self._io_thread is not threading.current_thread():
            self._io_thread.join()
        for memory in self._memories:
            memory.close()
