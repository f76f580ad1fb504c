"""How the ranks of a group find each other: authenticated TCP connections between pairs.

Each rank listens on its own address and dials the ranks below it, again and again until the deadline. What
calls and isn't a peer is hung up on and disturbs nobody. A pair may have several connections, one for each
`channel`: "control" to watch each other's life, "data" to move buffers.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from insitu.errors import AuthenticationError, ExchangeError, InputError, JoinTimeout, StaleGeneration
from insitu.exchange import tcp_tuning
from insitu.exchange.handshake import Handshake, HandshakeSteps, PeerInfo, ProtocolError, accept, dial
from insitu.exchange.transport import GroupConfig

_PATIENCE = 5.0
"""Seconds that a caller has for its handshake."""
_RETRY = 0.02
"""Seconds between two attempts to dial a rank that isn't there yet."""
_CALLERS = 64
"""Callers under way at most, beyond the number of ranks."""


_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Of this process. A forked one that kept them open would hide from the others that this one has died."""


def _close_in_child() -> None:
    for connection in list(_OPEN):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)

Key = tuple[int, str]
"""(rank, channel)"""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank: a connection to it (non-blocking, TCP_NODELAY) and what it said of itself."""

    rank: int
    connection: socket.socket
    card: PeerInfo


def parse_address(text: str, lowest: int = 1) -> tuple[str, int]:
    """(host, port) of `host:port`; an IPv6 host may stand in brackets. Port 0, which lets the system choose,
    is allowed with `lowest` 0. Raises InputError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not lowest <= int(port) < 65536:
        raise InputError(f"An address is host:port with a port in [{lowest}, 65536). Received: {text!r}")
    return host, int(port)


class _PendingHandshake:
    """One handshake under way on one connection."""

    def __init__(
        self, connection: socket.socket, talk: HandshakeSteps, key: Key | None, deadline: float
    ) -> None:
        self.connection = connection
        self.key = key  # whom we dialled; None: it called us
        self.deadline = deadline
        self._talk = Handshake(talk)

    @property
    def events(self) -> int:
        return selectors.EVENT_WRITE if self._talk.out else selectors.EVENT_READ

    def go_on(self) -> None:
        """Moves what can be moved. Raises OSError or ExchangeError where the peer fails."""
        if self._talk.out:
            # Dialling a free port of this very host may connect a socket to itself, and hold the port.
            if self.connection.getsockname() == self.connection.getpeername():
                raise ConnectionError("nobody listens there yet")
            self._talk.sent(self.connection.send(self._talk.out))
            return
        data = self.connection.recv(self._talk.missing)
        if not data:
            raise ConnectionError("one hung up before it had proved itself, as one with another secret does")
        self._talk.received(data)

    @property
    def card(self) -> PeerInfo | None:
        return self._talk.card

    @property
    def done(self) -> bool:
        return self.card is not None and not self._talk.out


class Rendezvous:
    """One rank's side of the meeting; a context manager that listens while it is open. `card` is what it
    says of itself; `check` raises ExchangeError for a peer's card that can't be in the same group;
    `cancelled`, asked in every round, ends the meeting with StaleGeneration."""

    def __init__(
        self,
        seat: GroupConfig,
        card: PeerInfo,
        check: Callable[[PeerInfo], None],
        secret: bytes,
        timeout: float,
        cancelled: Callable[[], bool],
    ) -> None:
        self._rank = seat.rank
        self._addresses = [parse_address(text) for text in seat.addresses]
        self._card = card
        self._check = check
        self._secret = secret
        self._name = seat.name
        self._cancelled = cancelled
        self._deadline = time.monotonic() + timeout
        self._peers: dict[Key, Peer] = {}
        self._retry_at: dict[Key, float] = {}
        self._notes: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._listener = self._listen(self._deadline)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0.0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def meet(self, ranks: Iterable[int], channel: str) -> dict[int, Peer]:
        """A connection to each of `ranks`, which ask for this one at the same time. Raises JoinTimeout,
        AuthenticationError, StaleGeneration, ExchangeError."""
        wanted = [(rank, channel) for rank in ranks if rank != self._rank]
        self._retry_at = {key: 0.0 for key in wanted if key[0] < self._rank and key not in self._peers}
        while any(key not in self._peers for key in wanted):
            self._turn(wanted)
        return {key[0]: self._peers[key] for key in wanted}

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops listening. After an error no connection stays open."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.connection.close()
        self._selector.close()
        self._listener.close()
        if kind is not None:
            for peer in self._peers.values():
                peer.connection.close()

    def _listen(self, deadline: float) -> socket.socket:
        """Bound to this rank's own address, never to every interface. The port may still be held for a
        moment by the group before."""
        host, port = self._addresses[self._rank]
        while True:
            try:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                listener = socket.create_server((host, port), family=family, backlog=128)
                listener.setblocking(False)
                _OPEN.add(listener)
                tcp_tuning.choose_before_connect(listener)
                return listener
            except OSError as error:
                self._heed()
                if time.monotonic() >= deadline:
                    raise ExchangeError(
                        f"{self._name(self._rank)} can't listen on {host}:{port}: {error.strerror or error}"
                    ) from error
                time.sleep(_RETRY)

    def _turn(self, wanted: Sequence[Key]) -> None:
        now = time.monotonic()
        self._heed()
        if now >= self._deadline:
            raise self.late([key[0] for key in wanted if key not in self._peers])
        for key, at in self._retry_at.items():
            if at <= now:
                self._dial(key)
        for ready, _ in self._selector.select(min(_RETRY, self._deadline - now)):
            if ready.data is None:
                self._answer(now)
            else:
                self._go_on(ready.data)
        for entry in list(self._selector.get_map().values()):
            if entry.data is not None and entry.data.deadline < now:
                self._drop(entry.data, "it said nothing for too long")

    def _heed(self) -> None:
        if self._cancelled():
            raise StaleGeneration(
                f"{self._name(self._rank)} doesn't wait for generation {self._card['generation']} any more: "
                "it was called off"
            )

    def _answer(self, now: float) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            callers = [entry.data for entry in self._selector.get_map().values() if entry.data is not None]
            callers = [call for call in callers if call.key is None]
            if len(callers) >= _CALLERS + len(self._addresses):
                # A peer needs but a moment: who keeps silent longest isn't one.
                self._drop(min(callers, key=lambda call: call.deadline), "too many callers said nothing")
            self._begin(connection, accept(self._secret, self._card), None, now + _PATIENCE)

    def _dial(self, key: Key) -> None:
        host, port = self._addresses[key[0]]
        self._retry_at[key] = float("inf")
        connection: socket.socket | None = None
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            tcp_tuning.choose_before_connect(connection)
            with contextlib.suppress(BlockingIOError):
                connection.connect(address)
        except OSError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, socket.gaierror):
                self._note(f"{host}: {error.strerror}")
            self._retry_at[key] = time.monotonic() + _RETRY
            return
        until = min(self._deadline, time.monotonic() + _PATIENCE)
        self._begin(connection, dial(self._secret, {**self._card, "channel": key[1]}), key, until)

    def _begin(self, connection: socket.socket, talk: HandshakeSteps, key: Key | None, until: float) -> None:
        connection.setblocking(False)
        _OPEN.add(connection)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        conversation = _PendingHandshake(connection, talk, key, until)
        self._selector.register(connection, conversation.events, conversation)

    def _go_on(self, talk: _PendingHandshake) -> None:
        try:
            talk.go_on()
            if talk.done:
                self._welcome(talk)
            else:
                self._selector.modify(talk.connection, talk.events, talk)
        except BlockingIOError:
            pass
        except AuthenticationError as error:
            self._drop(talk, str(error))
            if talk.key is not None:
                host, port = self._addresses[talk.key[0]]
                raise AuthenticationError(
                    f"{self._name(talk.key[0])} at {host}:{port} failed to prove itself. {error}"
                ) from error
        except (OSError, ProtocolError, json.JSONDecodeError, UnicodeDecodeError) as error:
            self._drop(talk, str(error))

    def _drop(self, talk: _PendingHandshake, why: str) -> None:
        self._selector.unregister(talk.connection)
        talk.connection.close()
        if talk.key is not None:
            self._retry_at[talk.key] = time.monotonic() + _RETRY
        self._note(why)

    def _note(self, why: str) -> None:
        if len(self._notes) < 5 and "refused" not in why and why not in self._notes:
            self._notes.append(why)

    def _welcome(self, talk: _PendingHandshake) -> None:
        card = talk.card or {}
        mine, theirs = self._card["generation"], card.get("generation")
        rank = card.get("rank")
        channel = card.get("channel") if talk.key is None else talk.key[1]
        if not isinstance(rank, int) or not isinstance(theirs, int) or not isinstance(channel, str):
            self._drop(talk, "a card without a rank")
        elif theirs > mine:
            raise StaleGeneration(
                f"{self._name(self._rank)} joins generation {mine}, but {self._name(rank)} is at {theirs}"
            )
        elif theirs < mine:
            self._drop(talk, f"{self._name(rank)} is still at generation {theirs}, not {mine}")
        elif rank == self._rank or (rank, channel) in self._peers or (talk.key and rank != talk.key[0]):
            raise ExchangeError(
                f"Two processes say that they are {self._name(rank)}; each rank of a group is one process"
            )
        else:
            self._check(card)
            self._selector.unregister(talk.connection)
            self._peers[rank, channel] = Peer(rank, talk.connection, card)

    def late(self, missing: Sequence[int]) -> JoinTimeout:
        names = ", ".join(f"{self._name(r)} ({':'.join(map(str, self._addresses[r]))})" for r in missing)
        notes = f" Seen meanwhile: {'; '.join(self._notes)}." if self._notes else ""
        return JoinTimeout(f"Did not join in time: {names}.{notes}", missing=tuple(missing))
