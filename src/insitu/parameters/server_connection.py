"""A worker's connections to one server: requests out, answers in, and what to do when the server is lost."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu import errors
from insitu.errors import (
    ParameterError,
    ServerLost,
    ServerMoved,
    ServerStalled,
)
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.futures import Future
from insitu.parameters.server_handshake import call, card
from insitu.parameters.wire import FAILURE, REQUEST, Array, BufferRef, Message

DENSE, ROWS = 0, 1
"""The lanes to each server: connections of their own, so that a large transfer holds up no lookups."""
LANES = 2
_RETRY = 0.02
_AGAIN = 0.7
"""Seconds that a server has to answer a call when it is looked for again."""


@dataclass(slots=True)
class Request:
    """One request that isn't answered yet, kept so that it can be sent again."""

    lane: int
    meta: dict[str, Any]
    arrays: Sequence[Array]
    places: Sequence[BufferRef | None]
    future: Future[Any]


class ServerConnection:
    """One server as a worker sees it. Not for several threads.

    `addresses` are where the server's state may be: at its own address and, where it's mirrored, at the
    mirror's.
    """

    def __init__(
        self, server: int, addresses: Sequence[str], rank: int, secret: bytes, transport: str
    ) -> None:
        self.server = server
        self.here = False
        """Whether the server can see this process's memory."""
        self.lanes: list[Connection] = []
        self.pending: dict[int, Request] = {}
        self.at = 0
        """Which of the addresses it is at."""
        self._addresses = list(addresses)
        self._rank = rank
        self._secret = secret
        self._transport = transport
        self._next = 1

    @property
    def address(self) -> str:
        return self._addresses[self.at]

    @property
    def unsent(self) -> bool:
        """Whether something is still to be sent."""
        return any(connection.sending for connection in self.lanes)

    def connect(self, deadline: float) -> None:
        """Dials until somebody answers, at the mirror's address too once it has taken long. Raises
        ServerLost after `deadline`, AuthenticationError, VersionMismatch."""
        own_until = time.monotonic() + _AGAIN
        while True:
            try:
                self.find(deadline)
                return
            except (OSError, ConnectionClosed, ServerMoved) as error:
                why = str(error)
            if time.monotonic() >= own_until:
                self.move()
            if time.monotonic() >= deadline:
                raise ServerLost(
                    f"Parameter server {self.server} at {self.address} can't be reached: {why}. One with "
                    "another secret answers like this too",
                    server=self.server,
                )
            time.sleep(_RETRY)

    def _dial(self, deadline: float) -> None:
        for lane in range(LANES):
            mine = card("worker", self._rank, lane=lane)
            connection, theirs = call(self.address, self._secret, mine, deadline)
            self.lanes.append(Connection(connection))
            if theirs.get("role") != "server":
                raise ParameterError(f"{self.address} is no parameter server")
            if not self.at and theirs.get("index") != self.server:
                raise ParameterError(
                    "Addresses must be those of all servers, in the order of their indices. Received for "
                    f"server {self.server}: {self.address}, where server {theirs.get('index')} is"
                )
            host = theirs.get("host")
            self.here = self._transport != "tcp" and bool(host) and host == mine["host"]
        if self._transport == "shm" and not self.here:
            raise ParameterError(
                f'transport="shm" needs all servers on one x86-64 Linux host. Server {self.server} at '
                f"{self.address} is not on that of worker {self._rank}"
            )

    def find(self, deadline: float) -> None:
        """Dials once where the server may be; at the mirror's address, asks it to take over. Raises OSError,
        Ended, ServerMoved, AuthenticationError, VersionMismatch."""
        try:
            self._dial(min(deadline, time.monotonic() + _AGAIN))
            if self.at:
                self.ask("take_over", {}, deadline)
        except ServerLost as error:
            self._hang_up()
            raise ServerMoved(str(error)) from error
        except BaseException:
            self._hang_up()
            raise

    def ask(self, operation: str, meta: Mapping[str, Any], deadline: float, *, lane: int = DENSE) -> Message:
        """One request, answered before any other, while the server is being found again."""
        asked = Message(REQUEST, 0, {"op": operation, "of": self.server, **meta})
        connection = self.lanes[lane]
        connection.send(asked)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerStalled(f"Server {self.server} at {self.address} gives no answer")
            poll = select.poll()
            poll.register(connection, select.POLLIN | (select.POLLOUT if connection.sending else 0))
            poll.poll(left * 1000)
            connection.flush()
            for message in connection.receive():
                if message.request == 0 and message.kind == FAILURE:
                    raise as_error(message.meta)
                if message.request == 0:
                    return message

    def _hang_up(self) -> None:
        for connection in self.lanes:
            connection.close()
        self.lanes = []

    # Requests

    def submit(
        self,
        future: Future[Any],
        operation: str,
        meta: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        *,
        lane: int = DENSE,
        places: Sequence[BufferRef | None] = (),
        hold: bool = False,
    ) -> None:
        """Sends a request; `future` gets the Message that answers. Arrays must not change until then. One to
        `hold` goes with the next one, and wakes the server once for both."""
        number = self._next
        self._next = self._next % 0xFFFFFFFF + 1
        request = Request(lane, {"op": operation, "of": self.server, **meta}, arrays, places, future)
        self.pending[number] = request
        try:
            if self.lanes:
                self._send(number, request, hold=hold)
        except BaseException:
            del self.pending[number]  # what can't be written down was never asked
            raise

    def _send(self, number: int, request: Request, *, hold: bool = False) -> None:
        message = Message(REQUEST, number, request.meta, request.arrays, request.places)
        with contextlib.suppress(
            ConnectionClosed
        ):  # whoever waits for the answer will find the connection ended
            connection = self.lanes[request.lane]
            (connection.put if hold else connection.send)(message)

    def receive(self, lane: int) -> None:
        """Takes what has come. Raises Ended, Malformed."""
        for message in self.lanes[lane].receive():
            request = self.pending.pop(message.request, None)
            if request is None:
                continue
            if message.kind == FAILURE and message.meta.get("error") == ServerMoved.__name__:
                self.pending[message.request] = request
                self.move()
                raise ConnectionClosed("what the server held has moved")
            if message.kind == FAILURE:
                request.future.fail(as_error(message.meta))
            else:
                request.future.resolve(message)

    def lose(self, recover: Callable[[ServerConnection], None]) -> None:
        """The server's connections have ended. `recover` finds it again or raises; then all that wasn't
        answered is sent again, in order."""
        self._hang_up()
        try:
            recover(self)
        except errors.InsituError as error:
            pending, self.pending = self.pending, {}
            for request in pending.values():
                request.future.fail(error)
            return
        for number, request in list(self.pending.items()):
            self._send(number, request)

    def move(self) -> None:
        """Looks at the next address from now on."""
        self.at = (self.at + 1) % len(self._addresses)

    def close(self) -> None:
        self._hang_up()
        pending, self.pending = self.pending, {}
        for request in pending.values():
            request.future.fail(ParameterError("The client was closed before the answer came"))


def as_error(meta: Mapping[str, Any]) -> errors.InsituError:
    """The error that a FAILURE tells of, as the class of that name."""
    kind = getattr(errors, str(meta.get("error")), None)
    text = str(meta.get("message", ""))
    if isinstance(kind, type) and issubclass(kind, errors.InsituError):
        try:
            return kind(text)
        except TypeError:
            pass
    return ParameterError(text)
