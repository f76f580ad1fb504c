"""A worker's connections to one server: sends requests, matches answers, and finds a lost server again."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.base import errors
from insitu.base.errors import (
    AuthenticationError,
    InsituError,
    ParameterError,
    ServerLost,
    ServerMoved,
    ServerStalled,
)
from insitu.exchange import BORROWERS, memory
from insitu.exchange.plan import PAGE
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.futures import Future
from insitu.parameters.memory_receiver import hand_over, make_ticket
from insitu.parameters.rules import FAILURE, REQUEST, Array, BufferRef, Message
from insitu.parameters.server_handshake import connect_to_server, make_peer_info

DENSE_LANE, ROWS_LANE = 0, 1
"""Each lane is a TCP connection of its own, so that a large dense transfer doesn't delay rows of tables."""
LANES = 2
_PROBE_SEGMENT = 0
"""Number of the segment that only shows whether memory can be handed over."""
_RETRY_INTERVAL = 0.02
"""Seconds between two attempts to connect."""
_CONNECT_TIMEOUT = 0.7
"""Seconds that a host has to accept a connection before the next address is tried; doubled with each
attempt."""
_MOST_DOUBLINGS = 4


@dataclass(slots=True)
class PendingRequest:
    """One request that isn't answered yet, kept so that it can be sent again."""

    #: DENSE_LANE or ROWS_LANE.
    lane: int
    #: The message's description; see `wire.Message`.
    meta: dict[str, Any]
    #: The arrays that come with it.
    arrays: Sequence[Array]
    #: The position of each array in shared memory, None for those in the message. Empty: all are.
    refs: Sequence[BufferRef | None]
    #: Completed with the answer.
    future: Future[Any]


class ServerConnection:
    """One server as a worker sees it. Only one thread may use it at a time."""

    def __init__(
        self, server: int, addresses: Sequence[str], rank: int, secret: bytes, transport: str
    ) -> None:
        """`addresses`: the server's own and, with mirrors, the one of the server that mirrors it."""
        #: The server's index.
        self.server = server
        #: Whether the server can map this process's memory. Set with each connection.
        self.shares_memory = False
        #: One connection for each lane; empty while there is none.
        self.lanes: list[Connection] = []
        #: Requests without an answer, by number, in the order of their submission.
        self.pending: dict[int, PendingRequest] = {}
        #: Index of the address that is used.
        self.address_index = 0
        self._addresses = list(addresses)
        self._rank = rank
        self._secret = secret
        self._transport = transport
        self._next_number = 1
        #: Seconds that connecting has taken the last time: some round trips.
        self.seconds_to_connect = 0.0
        #: Attempts to connect since the last one that succeeded.
        self._failures = 0
        #: Each lane's ticket, which says for which connection memory is handed over.
        self._tickets: list[str] = []

    @property
    def address(self) -> str:
        """The address that is used."""
        return self._addresses[self.address_index]

    @property
    def has_unsent(self) -> bool:
        """True while bytes of any lane wait to be sent."""
        return any(connection.has_unsent for connection in self.lanes)

    # Connecting

    def connect(self, deadline: float) -> None:
        """Connect, trying until `deadline` (monotonic); after a while at the mirror's address too.

        Raises ServerLost after the deadline, AuthenticationError, VersionMismatch, ParameterError.
        """
        own_address_until = time.monotonic() + _CONNECT_TIMEOUT
        refusal: AuthenticationError | None = None
        while True:
            try:
                self.connect_once(deadline)
                return
            except (OSError, ConnectionClosed, ServerMoved, AuthenticationError) as error:
                # Also a wrong proof is but a note: a stranger may listen in the server's place.
                reason = str(error)
                refusal = error if isinstance(error, AuthenticationError) else refusal
            if time.monotonic() >= own_address_until:
                self.use_next_address()
            if time.monotonic() >= deadline:
                if refusal is not None:
                    raise refusal
                raise ServerLost(
                    f"Parameter server {self.server} must answer at {self.address}. Received: {reason}. "
                    "Check that its task runs (insitu ps, insitu logs JOB ps:"
                    f"{self.server}) and that all tasks have the same secret",
                    server=self.server,
                )
            time.sleep(_RETRY_INTERVAL)

    def connect_once(self, deadline: float) -> None:
        """Connect at the present address; at a mirror's, ask it to take over.

        Raises OSError, ConnectionClosed, ServerMoved, AuthenticationError, VersionMismatch, ParameterError.
        """
        try:
            self._open_lanes(deadline)
            if self.address_index:
                self.call("take_over", {}, deadline)
            self._verify_memory(deadline)
        except ServerLost as error:
            self.disconnect()
            raise ServerMoved(str(error)) from error
        except BaseException:
            self.disconnect()
            raise

    def _open_lanes(self, deadline: float) -> None:
        start = time.monotonic()
        limit = _CONNECT_TIMEOUT * 2 ** min(self._failures, _MOST_DOUBLINGS)
        self._failures += 1
        for lane in range(LANES):
            own_info = make_peer_info("worker", self._rank, lane=lane, ticket=make_ticket())
            opened, peer = connect_to_server(self.address, self._secret, own_info, deadline, limit)
            self.lanes.append(Connection(opened, peer))
            self._tickets.append(own_info["ticket"])
            if peer.get("role") != "server":
                raise ParameterError(
                    f"Addresses must be those of parameter servers. Received for server {self.server}: "
                    f"{self.address}, where {peer.get('role')} {peer.get('index')} answers"
                )
            if not self.address_index and peer.get("index") != self.server:
                raise ParameterError(
                    "Addresses must be those of all servers, in the order of their indices. Received for "
                    f"server {self.server}: {self.address}, where server {peer.get('index')} is"
                )
            same_host = peer.get("host") == own_info["host"]
            near = bool(peer.get("memory")) and same_host and self.server < BORROWERS
            self.shares_memory = self._transport != "tcp" and near
        self._failures, self.seconds_to_connect = 0, time.monotonic() - start

    def _verify_memory(self, deadline: float) -> None:
        """Hand the server a page, and share no memory with it if that isn't possible.

        Raises ParameterError if sharing is required.
        """
        reason = "it isn't on this host"
        if self.shares_memory:
            file = memory.create("insitu-probe", PAGE)
            try:
                self.attach(DENSE_LANE, _PROBE_SEGMENT, file, PAGE, {"word": 0, "grant": 0}, deadline)
            except ServerStalled:
                raise  # its answer may still come, and would be taken for another one's
            except InsituError as error:
                self.shares_memory, reason = False, str(error)
            finally:
                os.close(file)
        if self._transport == "shm" and not self.shares_memory:
            raise ParameterError(
                'transport="shm" needs all servers on one x86-64 Linux host, and memory that can be handed '
                "to "
                f"them. Received: server {self.server} at {self.address}, for worker {self._rank}: "
                f"{reason}. Use "
                'the transport "auto" or "tcp"'
            )

    def attach(
        self, lane: int, number: int, file: int, size: int, grant: Mapping[str, int], deadline: float
    ) -> None:
        """Have the server map the segment `file` as `number`, while the connection carries no other request.

        `grant`: see Lender. Raises ConnectionClosed, InsituError.
        """
        self.hand_over(lane, number, file)
        self.call("attach", {"segment": number, "size": size, **grant}, deadline, lane=lane)

    def hand_over(self, lane: int, number: int, file: int) -> None:
        """Hand the server the segment `file`, before it is asked to map it. Raises ExchangeError."""
        peer = self.lanes[lane].peer_info
        hand_over(str(peer["memory"]), int(peer["process"]), self._tickets[lane], number, file)

    def disconnect(self) -> None:
        """Close all lanes. Unanswered requests stay, to be sent again or failed."""
        for connection in self.lanes:
            connection.close()
        self.lanes, self._tickets = [], []

    def use_next_address(self) -> None:
        """Use the next address from now on; after the last, the first."""
        self.address_index = (self.address_index + 1) % len(self._addresses)

    # Requests

    def call(
        self, operation: str, meta: Mapping[str, Any], deadline: float, *, lane: int = DENSE_LANE
    ) -> Message:
        """Send one request and wait for its answer, while the connection carries no other.

        Raises ServerStalled after `deadline`, ConnectionClosed, MalformedMessage, or the request's error.
        """
        connection = self.lanes[lane]
        connection.send(Message(REQUEST, 0, {"op": operation, "of": self.server, **meta}))
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerStalled(
                    f"Server {self.server} at {self.address} must answer {operation!r} within the timeout. "
                    "Received: nothing. Look into its log (insitu logs JOB ps:"
                    f"{self.server})"
                )
            poll = select.poll()
            poll.register(connection, select.POLLIN | (select.POLLOUT if connection.has_unsent else 0))
            poll.poll(left * 1000)
            connection.flush()
            for message in connection.receive():
                if message.request == 0 and message.kind == FAILURE:
                    raise parse_failure(message.meta)
                if message.request == 0:
                    return message

    def submit(
        self,
        future: Future[Any],
        operation: str,
        meta: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        *,
        lane: int = DENSE_LANE,
        refs: Sequence[BufferRef | None] = (),
        defer_send: bool = False,
    ) -> None:
        """Send a request whose answer, a Message, completes `future`. Arrays must not change until then.

        With `defer_send` it is sent together with the next one, which wakes the server once for both.
        """
        number = self._next_number
        self._next_number += 1
        request = PendingRequest(lane, {"op": operation, "of": self.server, **meta}, arrays, refs, future)
        self.pending[number] = request
        try:
            if self.lanes:
                self._send(number, request, defer_send=defer_send)
        except BaseException:
            del self.pending[number]  # it couldn't be encoded, so no answer will come
            raise

    def _send(self, number: int, request: PendingRequest, *, defer_send: bool = False) -> None:
        message = Message(REQUEST, number, request.meta, request.arrays, request.refs)
        with contextlib.suppress(ConnectionClosed):  # the thread that waits for the answer reconnects
            connection = self.lanes[request.lane]
            (connection.enqueue if defer_send else connection.send)(message)

    def receive(self, lane: int) -> None:
        """Complete the futures whose answers have arrived. Raises ConnectionClosed, MalformedMessage."""
        for message in self.lanes[lane].receive():
            request = self.pending.pop(message.request, None)
            if request is None:
                continue
            if message.kind == FAILURE and message.meta.get("error") == ServerMoved.__name__:
                self.pending[message.request] = request
                self.use_next_address()
                raise ConnectionClosed("the server's state has moved to another server")
            if message.kind == FAILURE:
                request.future.set_exception(parse_failure(message.meta))
            else:
                request.future.set_result(message)

    def resend_pending(self) -> None:
        """Send all unanswered requests again, in order, over new connections."""
        for number, request in list(self.pending.items()):
            self._send(number, request)

    def fail_pending(self, error: BaseException) -> None:
        """Fail all unanswered requests."""
        pending, self.pending = self.pending, {}
        for request in pending.values():
            request.future.set_exception(error)

    def close(self) -> None:
        """Close the connections and fail all unanswered requests."""
        self.disconnect()
        self.fail_pending(ParameterError("The client was closed before the answer came"))


def parse_failure(meta: Mapping[str, Any]) -> InsituError:
    """Return the error that a FAILURE describes, of the class that it names."""
    kind = getattr(errors, str(meta.get("error")), None)
    text = str(meta.get("message", ""))
    if isinstance(kind, type) and issubclass(kind, InsituError):
        try:
            return kind(text)
        except TypeError:
            pass
    return ParameterError(text)
