"""Requests to all servers, and who moves their bytes: whoever waits does it for all."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from insitu.errors import InsituError, ParameterError, ServerLost, ServerMoved, ServerStalled
from insitu.parameters.connection import ConnectionClosed
from insitu.parameters.futures import Future, gathered
from insitu.parameters.server_connection import DENSE, ServerConnection
from insitu.parameters.wire import Array, BufferRef, MalformedMessage, Message

_LONGEST = 0.05
"""Seconds in one wait for the connections at most."""
_ANEW = 1.0
"""Seconds for which a request looks again for a server that wasn't found in time before."""
_GRACE = 0.002
"""Seconds after which what nobody waits for any more is moved on."""


class RequestClient:
    """The links to all servers, in order. May be used by several threads."""

    def __init__(self, links: Sequence[ServerConnection], timeout: float, stall_timeout: float) -> None:
        self.links = list(links)
        self.lock = threading.RLock()
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._closed = False
        self._pumping = 0
        self._definitions: list[tuple[str, Mapping[str, Any]]] = []
        self._work = threading.Event()
        self._mover: threading.Thread | None = None

    def request(
        self,
        link: ServerConnection,
        operation: str,
        meta: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        lane: int = DENSE,
        places: Sequence[BufferRef | None] = (),
        hold: bool = False,
    ) -> Future[Any]:
        future: Future[Any] = Future(self.pump)
        with self.lock:
            if self._closed:
                raise ParameterError("The client is closed")
            link.submit(future, operation, meta, arrays, lane=lane, places=places, hold=hold)
            if link.unsent and not hold:
                self.keep_moving()
        return future

    def each(
        self,
        operation: str,
        metas: Sequence[Mapping[str, Any]],
        arrays: Sequence[Sequence[Array]],
        lane: int = DENSE,
        hold: bool = False,
    ) -> Future[list[Message]]:
        """One request to each server; see `Link.submit` for those to `hold`."""
        futures = [
            self.request(link, operation, meta, parts, lane, hold=hold)
            for link, meta, parts in zip(self.links, metas, arrays, strict=True)
        ]
        return gathered(futures, self.pump, list)

    def suspects_first(
        self, ask: Sequence[Callable[[], Future[Any]]], suspects: Collection[int]
    ) -> Future[list[Any]]:
        """`ask[i]()` sends server i its part of one change, which `suspects` may refuse: so they are asked,
        and waited for, before any other server makes it."""
        asked: dict[int, Future[Any]] = {}
        for server in sorted(range(len(ask)), key=lambda server: server not in suspects):
            asked[server] = ask[server]()
            if server in suspects:
                try:
                    asked[server].result()
                except InsituError:
                    return asked[server]
        return gathered([asked[server] for server in range(len(ask))], self.pump, list)

    def everywhere(self, operation: str, meta: Mapping[str, Any], lane: int = DENSE) -> Future[list[Message]]:
        return self.each(operation, [meta] * len(self.links), [()] * len(self.links), lane)

    def pump(self, future: Future[Any], timeout: float | None) -> None:
        """Moves the connections until `future` is done. Whoever waits does the work for all."""
        deadline = time.monotonic() + (self._stall_timeout if timeout is None else timeout)
        self._pumping += 1
        try:
            while not future.done():
                self._turn(min(_LONGEST, max(0.0, deadline - time.monotonic())))
                if time.monotonic() >= deadline and not future.done():
                    waiting = [f"{link.server} at {link.address}" for link in self.links if link.pending]
                    raise ServerStalled(f"No answer in time from parameter server {', '.join(waiting)}")
        finally:
            self._pumping -= 1

    def keep_moving(self) -> None:
        """From now on what is under way goes on also while nobody waits, which costs a thread: for requests
        that are made in two steps, and bytes that don't fit into the system's buffers at once."""
        if self._mover is None:
            self._mover = threading.Thread(target=self._move, name="parameter client", daemon=True)
            self._mover.start()
        self._work.set()

    def _move(self) -> None:
        while not self._closed:
            self._work.wait()
            if not any(link.pending for link in self.links):
                self._work.clear()
            elif self._pumping:
                time.sleep(_GRACE)
            else:
                self._turn(_LONGEST)

    def _turn(self, seconds: float) -> None:
        """Waits for any connection once, and moves what can be moved. Holds nobody up while it waits."""
        poll = select.poll()
        lanes = {}
        with self.lock:
            for link in self.links:
                if link.pending and not link.lanes:
                    link.lose(lambda lost: self._recover(lost, _ANEW))
                for lane, connection in enumerate(link.lanes):
                    lanes[connection.fileno()] = (link, lane, connection)
                    poll.register(connection, select.POLLIN | (select.POLLOUT if connection.sending else 0))
        for file, events in poll.poll(seconds * 1000):
            link, lane, connection = lanes[file]
            with self.lock:
                if lane < len(link.lanes) and link.lanes[lane] is connection:
                    self._serve(link, lane, events)

    def _serve(self, link: ServerConnection, lane: int, events: int) -> None:
        try:
            if events & select.POLLOUT:
                link.lanes[lane].flush()
            if events & ~select.POLLOUT:
                link.receive(lane)
        except (ConnectionClosed, MalformedMessage):
            link.lose(lambda lost: self._recover(lost, self._timeout))

    # When a server is lost

    def remember(self, operation: str, meta: Mapping[str, Any]) -> None:
        """A definition that a server must know before anything else, also one that takes another's place."""
        self._definitions.append((operation, meta))

    def _recover(self, link: ServerConnection, seconds: float) -> None:
        """Finds a lost server again: at its own address, or at its mirror's. Raises ServerLost where it isn't
        found in time, or has lost what it held."""
        deadline = time.monotonic() + seconds
        if self._closed:
            raise ParameterError("The client is closed")
        while True:
            try:
                link.find(deadline)
                self.reintroduce(link, deadline)
                return
            except (ConnectionClosed, OSError, ServerMoved) as error:
                link.move()
                why = str(error)
            if time.monotonic() >= deadline:
                raise ServerLost(
                    f"Parameter server {link.server} was lost, and isn't found again at {link.address}: "
                    f"{why}",
                    server=link.server,
                )
            time.sleep(_GRACE)

    def reintroduce(self, link: ServerConnection, deadline: float) -> None:
        """Tells a server that was found again what it must know of this worker."""
        for operation, meta in self._definitions:
            answer = link.ask(operation, meta, deadline)
            if operation == "define" and not answer.meta["initialised"]:
                raise ServerLost(
                    f"Parameter server {link.server} at {link.address} was started anew, without what it "
                    "held: there was no mirror (--ps-backups) and no checkpoint",
                    server=link.server,
                )

    def close(self) -> None:
        """Hangs up; what is under way fails."""
        with self.lock:
            self._closed = True
            self._work.set()
            for link in self.links:
                link.close()
        if self._mover is not None and self._mover is not threading.current_thread():
            self._mover.join()
