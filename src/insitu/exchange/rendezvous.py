"""The rendezvous of the ranks of a group: authenticated TCP connections between pairs.

Each rank listens on its own address and dials the ranks below it, again and again until the deadline. A
caller that isn't a peer is disconnected and has no other effect. A pair has a connection for each `channel`:
"control" for liveness and small messages, "data" for buffers.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from insitu.base.errors import AuthenticationError, ExchangeError, InputError, JoinTimeout, StaleGeneration
from insitu.base.net import ports
from insitu.exchange import tcp_tuning
from insitu.exchange.forks import close_in_children
from insitu.exchange.handshake import PeerInfo, ProtocolError
from insitu.exchange.plan import GroupConfig
from insitu.exchange.resolver import Address, Resolver
from insitu.exchange.socket_handshake import SocketHandshake
from insitu.exchange.tls import read_tls_settings

_HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a caller has for its handshake."""
_RETRY_INTERVAL = 0.02
"""Seconds between two attempts to dial a rank that doesn't listen yet."""
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
"""Errors of an address to which there is no way."""
_NO_ROUTE_SECONDS = 5.0
"""Seconds for which there may be no way to an address of this host, which then needs its user."""
_MAX_CALLERS = 64
"""Handshakes of callers under way at most, beyond the number of ranks."""
_BACKLOG = 128
_ACCEPTS_PER_TURN = 64
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` after which the caller still waits: the listener would be ready again at once."""
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting after such an error."""

Key = tuple[int, str]
"""(rank, channel)"""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank that has proved that it knows the secret."""

    #: Its rank in the group.
    rank: int
    #: Non-blocking, with TCP_NODELAY; a TlsSocket if it is encrypted.
    connection: socket.socket
    #: The facts that it sent about itself.
    info: PeerInfo


def parse_address(text: str, lowest: int = 1) -> tuple[str, int]:
    """Return (host, port) of `host:port`; an IPv6 host may be in brackets.

    `lowest` 0 allows port 0, with which the system chooses one. Raises InputError.
    """
    host, _, port = text.rpartition(":")
    is_whole = host.startswith("[") == host.endswith("]")
    host = host.removeprefix("[").removesuffix("]")
    if not is_whole or not host or not port.isdecimal() or not lowest <= int(port) < 65536:
        raise InputError(f"An address is host:port with a port in [{lowest}, 65536). Received: {text!r}")
    return host, int(port)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingHandshake:
    """One handshake under way on one connection."""

    #: The handshake itself.
    handshake: SocketHandshake
    #: The peer that this rank dialled; None: the peer called.
    key: Key | None


class Rendezvous:
    """One rank's side of the rendezvous; a context manager that listens while it is open."""

    def __init__(
        self,
        config: GroupConfig,
        info: PeerInfo,
        check: Callable[[PeerInfo], None],
        secret: bytes,
        timeout: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """`info` are the facts that this rank sends about itself. `check` raises ExchangeError for the info
        of a peer that can't be in the same group. `cancelled` is polled; True ends the wait with
        StaleGeneration."""
        self._rank = config.rank
        self._addresses = [parse_address(text) for text in config.addresses]
        self._info = info
        self._check = check
        self._secret = secret
        self._tls_settings = read_tls_settings()
        self._name = config.name
        self._cancelled = cancelled
        self._deadline = time.monotonic() + timeout
        self._peers: dict[Key, Peer] = {}
        self._retry_at: dict[Key, float] = {}
        self._failures: list[str] = []
        self._resolver = Resolver()
        #: Attempts to dial a peer so far: each takes the next of its addresses.
        self._attempts: dict[Key, int] = {}
        #: When there was no way to an address of this host first; 0.0: there is one.
        self._no_route_since = 0.0
        #: Time on the monotonic clock before which no caller is accepted; 0.0: the listener is watched.
        self._accept_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._listener = self._listen(self._deadline)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0.0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def connect(self, ranks: Iterable[int], channel: str) -> dict[int, Peer]:
        """Return a connection to each of `ranks`, which call this for this rank at the same time.

        Raises JoinTimeout, AuthenticationError, StaleGeneration, ExchangeError.
        """
        wanted = [(rank, channel) for rank in ranks if rank != self._rank]
        self._retry_at = {key: 0.0 for key in wanted if key[0] < self._rank and key not in self._peers}
        while any(key not in self._peers for key in wanted):
            self._poll(wanted)
        return {key[0]: self._peers[key] for key in wanted}

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop listening. After an error no connection stays open."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.handshake.socket.close()
        self._selector.close()
        ports.stop_listening(self._listener)
        self._listener.close()
        if kind is not None:
            for peer in self._peers.values():
                peer.connection.close()

    def _listen(self, deadline: float) -> socket.socket:
        """Listen on this rank's own address, never on every interface. The group before may still hold the
        port for a short time."""
        host, port = self._addresses[self._rank]
        while True:
            try:
                listener = ports.take_inherited(host, port) or self._open_listener(host, port)
                close_in_children(listener)
                tcp_tuning.choose_before_connect(listener)
                listener.setblocking(False)
                listener.listen(_BACKLOG)
                return listener
            except OSError as error:
                self._raise_if_cancelled()
                self._check_route(error, host, port)
                if time.monotonic() >= deadline:
                    raise ExchangeError(
                        f"{self._name(self._rank)} must be able to listen on its address, {host}:{port}. "
                        f"Received: {error.strerror or error}. Choose a free port of this host"
                    ) from error
                time.sleep(_RETRY_INTERVAL)

    def _open_listener(self, host: str, port: int) -> socket.socket:
        """Return a socket that is bound to the address. Raises OSError, also while its name isn't known
        yet."""
        found = self._resolver.find(host, port)
        # A name may stand for the loopback interface first, which no other host can call.
        others = [each for each in found if not each.is_loopback] or found
        if not others:
            raise OSError(errno.EAGAIN, self._resolver.get_failure(host) or "its name isn't known")
        listener = socket.socket(others[0].family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if others[0].family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(others[0].address)
        except BaseException:
            listener.close()
            raise
        return listener

    def _poll(self, wanted: Sequence[Key]) -> None:
        """Dial, accept and advance handshakes once. Raise if the wait is over."""
        now = time.monotonic()
        self._raise_if_cancelled()
        if now >= self._deadline:
            raise self.timeout_error([key[0] for key in wanted if key not in self._peers])
        for key, at in self._retry_at.items():
            if at <= now:
                self._dial(key)
        if self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        for ready, _ in self._selector.select(min(_RETRY_INTERVAL, self._deadline - now)):
            if ready.data is None:
                self._accept(now)
            else:
                self._advance(ready.data)
        for entry in list(self._selector.get_map().values()):
            if entry.data is not None and entry.data.handshake.deadline < now:
                self._drop(entry.data, f"a peer sent nothing for {_HANDSHAKE_TIMEOUT:g} s")

    def _raise_if_cancelled(self) -> None:
        if self._cancelled():
            raise StaleGeneration(
                f"A rank joins the newest generation only. Received: generation {self._info['generation']} "
                f"for {self._name(self._rank)}, which was cancelled while it waited. "
                "Call rejoin() with the newer generation"
            )

    def _accept(self, now: float) -> None:
        """Accept those who call, and begin their handshakes."""
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._selector.unregister(self._listener)
                    self._accept_at = now + _ACCEPT_PAUSE
                    self._record_failure(f"no caller could be accepted: {error.strerror}")
                return
            pending = [entry.data for entry in self._selector.get_map().values() if entry.data is not None]
            callers = [each for each in pending if each.key is None]
            if len(callers) >= _MAX_CALLERS + len(self._addresses):
                # The handshake of a peer is short, so the caller that is silent for longest isn't one.
                oldest = min(callers, key=lambda pending: pending.handshake.deadline)
                self._drop(oldest, "too many callers sent nothing")
            self._begin(connection, self._info, None, now + _HANDSHAKE_TIMEOUT)

    def _dial(self, key: Key) -> None:
        """Dial a peer at the next of its addresses, and begin the handshake."""
        host, port = self._addresses[key[0]]
        found = self._resolver.find(host, port)
        if not found:
            if failure := self._resolver.get_failure(host):
                self._record_failure(f"{host}: {failure}")
            self._retry_at[key] = time.monotonic() + _RETRY_INTERVAL
            return
        attempt = self._attempts[key] = self._attempts.get(key, -1) + 1
        self._retry_at[key] = float("inf")
        try:
            connection = _connect(found[attempt % len(found)])
        except OSError as error:
            self._record_failure(f"{host}: {error.strerror}")
            if found[attempt % len(found)].is_loopback or host == self._addresses[self._rank][0]:
                self._check_route(error, host, port)
            self._retry_at[key] = time.monotonic() + _RETRY_INTERVAL
            return
        self._no_route_since = 0.0
        until = min(self._deadline, time.monotonic() + _HANDSHAKE_TIMEOUT)
        self._begin(connection, {**self._info, "channel": key[1]}, key, until)

    def _check_route(self, error: OSError, host: str, port: int) -> None:
        """Raise ExchangeError if there has been no way to an address of this host for a while."""
        now = time.monotonic()
        if error.errno not in _NO_ROUTE:
            return
        self._no_route_since = self._no_route_since or now
        if now - self._no_route_since >= _NO_ROUTE_SECONDS:
            raise ExchangeError(
                f"Ranks of one host must reach each other at its addresses. Received: {error.strerror} for "
                f"{host}:{port}. Bring that interface up, such as with `ip link set lo up`, or give "
                f"addresses that this host has"
            ) from error

    def _begin(self, connection: socket.socket, info: PeerInfo, key: Key | None, until: float) -> None:
        """Begin a handshake in which this rank sends `info`."""
        connection.setblocking(False)
        close_in_children(connection)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dialled = key is not None
        handshake = SocketHandshake(
            connection, self._secret, info, self._tls_settings, dialled=dialled, deadline=until
        )
        self._selector.register(handshake, handshake.events, _PendingHandshake(handshake, key))

    def _advance(self, pending: _PendingHandshake) -> None:
        """Advance a handshake; drop it if the peer fails."""
        handshake = pending.handshake
        try:
            if handshake.advance():
                self._admit(pending)
            else:
                self._selector.modify(handshake, handshake.events, pending)
        except (OSError, AuthenticationError, ProtocolError, ValueError) as error:
            # Also a wrong proof is but a note: a stranger may have called, or may listen in a rank's place.
            handshake.send_answer(error)
            self._drop(pending, self._describe(pending, error))

    def _describe(self, pending: _PendingHandshake, error: Exception) -> str:
        """Return why a handshake failed, with the peer's name if this rank dialled it."""
        if pending.key is None or not isinstance(error, ExchangeError):
            return str(error)
        host, port = self._addresses[pending.key[0]]
        return f"{self._name(pending.key[0])} at {host}:{port} did not prove that it is one: {error}"

    def _drop(self, pending: _PendingHandshake, reason: str) -> None:
        """Disconnect a peer; dial it again later if this rank dialled it."""
        self._selector.unregister(pending.handshake)
        pending.handshake.socket.close()
        if pending.key is not None:
            self._retry_at[pending.key] = time.monotonic() + _RETRY_INTERVAL
        self._record_failure(reason)

    def _record_failure(self, reason: str) -> None:
        """Keep a reason for the message of JoinTimeout."""
        if len(self._failures) < 5 and "refused" not in reason and reason not in self._failures:
            self._failures.append(reason)

    def _admit(self, pending: _PendingHandshake) -> None:
        """Take a peer that has proved that it knows the secret. Raise if it can't be in the same group."""
        info = pending.handshake.peer_info or {}
        own, theirs = self._info["generation"], info.get("generation")
        rank = info.get("rank")
        channel = info.get("channel") if pending.key is None else pending.key[1]
        if not isinstance(rank, int) or not isinstance(theirs, int) or not isinstance(channel, str):
            self._drop(pending, "a peer reported no rank")
        elif theirs > own:
            raise StaleGeneration(
                f"A rank joins the newest generation only. Received: generation {own} for "
                f"{self._name(self._rank)}, but {self._name(rank)} is at {theirs}. "
                "Call rejoin() with the newer generation"
            )
        elif theirs < own:
            self._drop(pending, f"{self._name(rank)} is still at generation {theirs}, not {own}")
        elif rank == self._rank or (rank, channel) in self._peers or (pending.key and rank != pending.key[0]):
            raise ExchangeError(
                f"Each rank of a group is one process. Received: rank {rank} from two processes, as "
                f"{self._name(rank)}. Start each task once, and give each process its own rank"
            )
        else:
            self._check(info)
            self._selector.unregister(pending.handshake)
            self._peers[rank, channel] = Peer(rank, pending.handshake.socket, info)

    def timeout_error(self, missing: Sequence[int]) -> JoinTimeout:
        """Return the error that names the ranks that are missing at the deadline."""
        names = ", ".join(f"{self._name(r)} ({':'.join(map(str, self._addresses[r]))})" for r in missing)
        failures = f" Failures: {'; '.join(self._failures)}." if self._failures else ""
        return JoinTimeout(
            f"All {len(self._addresses)} ranks must join before the timeout. "
            f"Received: {len(self._addresses) - len(missing)} ranks, without {names}.{failures} "
            "Check that these tasks run and that their addresses can be reached, or raise the timeout",
            missing=tuple(missing),
        )


def _connect(to: Address) -> socket.socket:
    """Return a non-blocking socket that connects. Raises OSError."""
    connection = socket.socket(to.family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        tcp_tuning.choose_before_connect(connection)
        with contextlib.suppress(BlockingIOError):
            connection.connect(to.address)
    except BaseException:
        connection.close()
        raise
    return connection
