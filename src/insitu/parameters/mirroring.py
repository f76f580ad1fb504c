"""Mirrors: each server's state is kept on the next server too, and outlives either of them.

    mirror                            primary
    copy                        ->                      the mirror asks, whenever it has no copy
                                <-    snapshot          and from then on, each change in order:
                                <-    change n
    done n                      ->                      only now the worker is answered

When the primary dies, the first worker that notices asks the mirror to `take_over`, which it does only once
its own connection to the primary has ended; whatever the old primary still sends is refused, so that it can
acknowledge nothing any more. A server that starts anew first asks the next one to `hand_over` what it holds
of it, and is copied in turn. What was acknowledged is lost only where both die before one of them has been
replaced, or where the network parts them and workers reach both.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from insitu.errors import CheckpointError, InsituError, ServerLost, ServerMoved
from insitu.parameters import snapshots
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.request_handler import RequestHandler
from insitu.parameters.server_handshake import call, card
from insitu.parameters.server_state import ServerState
from insitu.parameters.wire import FAILURE, REPLY, REQUEST, Message, error_meta

Role = Literal["starting", "primary", "mirror", "handed over"]
_LOG = logging.getLogger("insitu")
_RETRY = 0.1
"""Seconds between two attempts to find the other server."""
_DIALLING = 2.0
WAIT_FOR_MIRROR = 10.0
"""Seconds for which a new primary acknowledges nothing while it has no mirror, and for which a server that
starts looks for one that holds its state."""


@dataclass(slots=True)
class Hosted:
    """The state of one server, as this process has it. `early`: requests that came before it was ready."""

    service: RequestHandler
    role: Role
    mirror: Connection | None = None
    handed_to: Connection | None = None
    """Whom it was handed over to. Dies that one before it has a mirror again, it has acknowledged nothing."""
    changes: int = 0
    expects_until: float = 0.0
    """Until when (monotonic) changes wait for a mirror to come."""
    early: list[tuple[Connection, Message]] = field(default_factory=list)


class MirrorManager:
    """What one process of the servers holds, and its part in keeping mirrors. Not for several threads, except
    for what it starts itself."""

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        backups: int,
        secret: bytes,
        make: Callable[[int, Callable[[Message], int | None]], RequestHandler],
        adopt: Callable[[socket.socket], Connection],
        wake: Callable[[], None],
        restore: Callable[[ServerState], None],
    ) -> None:
        """`make(server, changed)` makes the service of new holdings, `adopt(socket)` has the loop look after
        a connection that was dialled, `wake()` makes the loop call `tick` soon; `restore` puts a checkpoint
        into new holdings, where there is one."""
        self.hosted: dict[int, Hosted] = {}
        self._index = index
        self._addresses = list(addresses)
        self._backups = backups
        self._secret = secret
        self._make = make
        self._adopt = adopt
        self._wake = wake
        self._restore = restore
        self._next = (index + 1) % max(1, len(addresses))
        self._before = (index - 1) % max(1, len(addresses))
        self._dialled: queue.SimpleQueue[tuple[str, socket.socket | None]] = queue.SimpleQueue()
        self._dialling: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._asked: dict[Connection, str] = {}
        self._copied_over: Connection | None = None
        self._give_up_at = time.monotonic() + WAIT_FOR_MIRROR
        self._host(index, "starting" if backups else "primary")
        if not backups:
            self._restore(self.hosted[index].service.holdings)

    def _host(self, server: int, role: Role) -> Hosted:
        hosted = Hosted(self._make(server, lambda message: self._changed(server, message)), role)
        self.hosted[server] = hosted
        return hosted

    # Requests

    def handle(self, connection: Connection, message: Message) -> None:
        """A request of a worker or of another server. Raises Malformed."""
        server = message.meta.get("of", self._index)
        operation = message.meta.get("op")
        hosted = self.hosted.get(server) if isinstance(server, int) else None
        try:
            if operation in ("copy", "hand_over", "take_over"):
                getattr(self, f"_{operation}")(connection, message, server, hosted)
            elif message.meta.get("change"):
                self._replicate(connection, message, hosted)
            elif hosted is None or hosted.role in ("mirror", "handed over"):
                raise ServerMoved(f"Server {server} doesn't live here")
            elif hosted.role == "starting":
                hosted.early.append((connection, message))
            else:
                hosted.service.handle(connection, message)
        except InsituError as error:
            self._send(connection, Message(FAILURE, message.request, dict(error_meta(error))))

    @staticmethod
    def _send(connection: Connection, message: Message) -> bool:
        try:
            connection.send(message)
        except ConnectionClosed:
            return False  # the loop sees it too, and cleans up
        return True

    def _take_over(
        self, connection: Connection, message: Message, server: int, hosted: Hosted | None
    ) -> None:
        if hosted is None or hosted.role == "starting":
            raise ServerLost(f"Nothing of server {server} is held here", server=server)
        if hosted.role == "handed over":
            raise ServerMoved(f"Server {server} is back at its own address")
        if hosted.role == "mirror" and self._copied_over is not None:
            # A worker that is late, or that can't reach it: the mirror can, and so it is no mirror's turn.
            raise ServerMoved(f"Server {server} lives, at its own address")
        if hosted.role != "primary":
            _LOG.warning("Parameter server %d takes over from server %d", self._index, server)
            hosted.role = "primary"
        self._send(connection, Message(REPLY, message.request, {}))

    def _copy(self, connection: Connection, message: Message, server: int, hosted: Hosted | None) -> None:
        """Another server becomes the mirror."""
        if hosted is None or hosted.role != "primary":
            raise ServerMoved(f"Server {server} isn't ready here")
        holdings = hosted.service.holdings
        self._send_snapshot(connection, message, holdings)
        hosted.mirror = connection
        # Its answer says that the mirror has all that has happened so far.
        self._changed(server, Message(REQUEST, 0, {"op": "noted", "of": server}))

    def _hand_over(
        self, connection: Connection, message: Message, server: int, hosted: Hosted | None
    ) -> None:
        """The server whose state is held here has started anew."""
        if hosted is None or hosted.role == "starting":
            self._send(connection, Message(REPLY, message.request, {"held": False}))
            return
        hosted.role, hosted.handed_to = "handed over", connection
        hosted.service.abandon(ServerMoved(f"Server {server} is back at its own address"))
        self._send_snapshot(connection, message, hosted.service.holdings)
        self._retry_at["copy"] = 0.0

    def _send_snapshot(self, connection: Connection, message: Message, holdings: ServerState) -> None:
        snapshot = snapshots.take(holdings)
        arrays = [np.array(array) for array in snapshot.arrays.values()]
        meta = {"held": True, "snapshot": snapshot.meta, "names": list(snapshot.arrays)}
        self._send(connection, Message(REPLY, message.request, meta, arrays))

    def _replicate(self, connection: Connection, message: Message, hosted: Hosted | None) -> None:
        if hosted is None or hosted.role != "mirror":
            raise ServerMoved(f"Server {self._index} isn't the mirror any more")
        hosted.service.replicate(connection, message)

    def _changed(self, server: int, message: Message) -> int | None:
        """Tells the mirror of a change; the number that its answer must wait for."""
        hosted = self.hosted[server]
        if hosted.mirror is None:
            if time.monotonic() >= hosted.expects_until:
                return None
            hosted.changes += 1
            return hosted.changes
        hosted.changes += 1
        # The numbers may lie in a worker's memory, which is the worker's again before they are sent.
        arrays = [np.array(array) for array in message.arrays]
        told = Message(REQUEST, hosted.changes, {**message.meta, "change": True}, arrays)
        if not self._send(hosted.mirror, told):
            self._lose_mirror(hosted)
            return None
        return hosted.changes

    def _lose_mirror(self, hosted: Hosted) -> None:
        _LOG.warning(
            "Server %d has no mirror any more, and goes on without until there is one again",
            hosted.service.holdings.server,
        )
        hosted.mirror = None
        hosted.expects_until = 0.0
        hosted.service.mirrored = False
        hosted.service.release(None)

    # Answers of other servers

    def answered(self, connection: Connection, message: Message) -> None:
        """A REPLY or FAILURE came: of a mirror to a change, or of a server that was asked for its state."""
        asked = self._asked.pop(connection, None)
        if asked is not None:
            self._got_state(connection, asked, message)
            return
        for hosted in self.hosted.values():
            if hosted.mirror is connection:
                if message.kind == FAILURE:
                    # The mirror has taken over: nothing may be acknowledged here any more.
                    hosted.mirror = None
                    hosted.role = "handed over"
                    hosted.service.abandon(ServerMoved("The mirror of this server has taken over"))
                else:
                    hosted.service.mirrored = True
                    hosted.service.release(message.request)

    def _got_state(self, connection: Connection, asked: str, message: Message) -> None:
        server = self._index if asked == "hand_over" else self._before
        if message.kind == FAILURE:
            self._again(asked)
            return
        hosted = self.hosted.get(server)
        if asked == "copy":
            if hosted is not None and hosted.role == "primary":
                return
            hosted = self._host(server, "mirror")
            self._copied_over = connection
        if hosted is None:
            return
        if message.meta["held"]:
            arrays = dict(zip(message.meta["names"], message.arrays, strict=True))
            try:
                snapshots.put(hosted.service.holdings, snapshots.Snapshot(message.meta["snapshot"], arrays))
            except (CheckpointError, InsituError) as error:
                if asked == "hand_over":
                    raise  # Ends this process: half of a state must not be served, and the mirror has it all.
                _LOG.error("The state of server %d can't be taken over: %s", server, error)
        if asked == "hand_over":
            self._ready(hosted, bool(message.meta["held"]))

    def _ready(self, hosted: Hosted, held: bool) -> None:
        """This process's own server begins to answer."""
        if not held:
            self._restore(hosted.service.holdings)
        hosted.role = "primary"
        hosted.expects_until = time.monotonic() + WAIT_FOR_MIRROR
        early, hosted.early = hosted.early, []
        for connection, message in early:
            self.handle(connection, message)

    # Looking for other servers

    def tick(self, now: float) -> None:
        """Call now and then, and after `wake`."""
        while not self._dialled.empty():
            self._ask(*self._dialled.get())
        for hosted in self.hosted.values():
            if hosted.mirror is None and hosted.expects_until and now >= hosted.expects_until:
                hosted.expects_until = 0.0
                hosted.service.release(None)
        if not self._backups:
            return
        own = self.hosted[self._index]
        if own.role == "starting":
            if now >= self._give_up_at:
                self._ready(own, False)
            else:
                self._dial("hand_over", self._next, now)
        before = self.hosted.get(self._before)
        if self._copied_over is None and (before is None or before.role in ("mirror", "handed over")):
            self._dial("copy", self._before, now)

    def _dial(self, what: str, server: int, now: float) -> None:
        """Dials in a thread: the one that is called may be calling us."""
        busy = what in self._dialling or what in self._asked.values()
        if busy or now < self._retry_at.get(what, 0.0):
            return
        self._dialling.add(what)
        mine = card("server", self._index)

        def run() -> None:
            found: socket.socket | None = None
            try:
                deadline = time.monotonic() + _DIALLING
                found, _ = call(self._addresses[server], self._secret, mine, deadline)
            except (OSError, InsituError, ValueError) as error:
                _LOG.debug("Server %d isn't there for server %d: %s", server, self._index, error)
            self._dialled.put((what, found))
            self._wake()

        threading.Thread(target=run, name=f"dial {server}", daemon=True).start()

    def _ask(self, what: str, found: socket.socket | None) -> None:
        self._dialling.discard(what)
        if found is None:
            self._again(what)
            return
        connection = self._adopt(found)
        self._asked[connection] = what
        server = self._index if what == "hand_over" else self._before
        self._send(connection, Message(REQUEST, 1, {"op": what, "of": server}))

    def _again(self, what: str) -> None:
        self._retry_at[what] = time.monotonic() + _RETRY

    def ended(self, connection: Connection) -> None:
        """A connection has ended, of whomever."""
        asked = self._asked.pop(connection, None)
        if asked is not None:
            self._again(asked)
        if self._copied_over is connection:
            self._copied_over = None
            self._again("copy")
        for hosted in self.hosted.values():
            hosted.early = [entry for entry in hosted.early if entry[0] is not connection]
            hosted.service.forget(connection)
            if hosted.handed_to is connection and hosted.role == "handed over":
                hosted.role, hosted.handed_to = "mirror", None
            if hosted.mirror is connection:
                self._lose_mirror(hosted)
