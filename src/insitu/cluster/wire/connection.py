"""Connections to the head: TLS, then the proofs of the cluster's token, then messages.

They are encrypted on the loopback interface, too: they carry what is believed and done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from insitu.base.errors import AuthenticationError, ClusterError, ExchangeError, InputError
from insitu.base.net.ports import format_address
from insitu.cluster.engines import Channel, ChannelClosed
from insitu.cluster.wire.addresses import family_of
from insitu.cluster.wire.messages import MAX_LINE_BYTES, Message
from insitu.exchange import PeerInfo, SocketHandshake, connect_within, parse_address, read_tls_settings

ROOM = "agents"
"""What both sides name in the handshake, so that a task of a job isn't taken for a head."""
CONNECT_SECONDS = 10.0


class HeadUnreachable(ClusterError):
    """Nobody listens at the address of a head, or it can't be reached from here."""


HANDSHAKE_SECONDS = 10.0
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 30, 10, 3
"""After so many seconds of silence the system asks the other host, so far apart, and so often in vain."""
_ANSWER_SECONDS = 5.0
_MAX_HANDSHAKES = 64
"""Handshakes under way. Of more callers the one that has waited for longest is dropped."""
_BACKLOG = 128
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` after which the caller still waits: the listener would be ready again at once."""
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting after such an error."""


@dataclass(frozen=True, slots=True)
class HeadConnection:
    """A connection to the head, whose two ends have proved the token."""

    #: Carries the messages.
    channel: Channel
    #: What the head says about itself.
    head: PeerInfo
    #: The numeric address of this end.
    own_host: str


def dial_head(address: str, token: str, role: str, seconds: float = CONNECT_SECONDS) -> HeadConnection:
    """Connect to the head at `address` as `role`, "agent" or "client".

    Raises InputError for what is no address, and ClusterError where no head answers or the token is another.
    """
    return dial(address, token, {"role": role}, "head", seconds)


def dial(
    address: str, token: str, own_info: PeerInfo, expected: str, seconds: float = CONNECT_SECONDS
) -> HeadConnection:
    """Connect to the process at `address` whose role is `expected`, and tell it `own_info`, with a role.

    Raises InputError, ClusterError; see `dial_head`.
    """
    host, port = parse_address(address)
    try:
        connection = connect_within(host, port, seconds)
    except OSError as error:
        raise HeadUnreachable(
            f"The {expected} must be reachable from this machine. Received: {address} "
            f"({error.strerror or error}). Check the name, the port, and that the head runs: `insitu nodes` "
            f"on its machine"
        ) from error
    own_host = str(connection.getsockname()[0])
    connection.setblocking(False)
    _configure(connection)
    settings = dataclasses.replace(read_tls_settings(), mode="always")
    deadline = time.monotonic() + min(HANDSHAKE_SECONDS, seconds)
    info: PeerInfo = {"room": ROOM, **own_info}
    handshake = SocketHandshake(connection, token.encode(), info, settings, dialled=True, deadline=deadline)
    try:
        _complete(handshake)
    except AuthenticationError as error:
        handshake.socket.close()
        raise ClusterError(
            f"The {expected} at {address} has another token than this machine. Copy the file `token` of the "
            f"head's INSITU_HOME, with mode 0600"
        ) from error
    except (OSError, ExchangeError, ValueError) as error:
        handshake.socket.close()
        raise ClusterError(
            f"A {expected} of this version of insitu must listen at {address}. Received: {error}. Check the "
            f"address and the version of insitu there"
        ) from error
    head = handshake.peer_info or {}
    if head.get("room") != ROOM or head.get("role") != expected:
        handshake.socket.close()
        raise ClusterError(f"A {expected} must listen at {address}. Received: {head.get('role')!r}")
    return HeadConnection(Channel(handshake.socket, MAX_LINE_BYTES), head, own_host)


def _configure(connection: socket.socket) -> None:
    """Send small messages at once, and have the system notice within a minute that the other host is gone.

    Else a caller that follows a quiet log waits for ever, and one that is gone holds a place at the head.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    # Not TCP_USER_TIMEOUT, which also counts the time for which a user looks at a page of the output.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _complete(handshake: SocketHandshake) -> None:
    while not handshake.advance():
        left = handshake.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer to the handshake")
        poll = select.poll()
        poll.register(handshake, select.POLLOUT if handshake.has_unsent else select.POLLIN)
        poll.poll(left * 1000)


def ask_head(
    address: str, token: str, message: Message, seconds: float, *, connect_seconds: float = CONNECT_SECONDS
) -> Message:
    """Send one message to the head and return its answer. Raises InputError, ClusterError."""
    found = dial_head(address, token, "client", connect_seconds)
    with contextlib.closing(found.channel):
        deadline = time.monotonic() + seconds
        try:
            found.channel.send(message)
            while (left := deadline - time.monotonic()) > 0:
                waiting = not found.channel.flush()
                poll = select.poll()
                poll.register(found.channel, select.POLLIN | (select.POLLOUT if waiting else 0))
                poll.poll(left * 1000)
                for answer in found.channel.receive():
                    if "error" in answer:
                        raise ClusterError(str(answer["error"]))
                    return answer
        except ChannelClosed:
            raise ClusterError(f"The head at {address} has ended the connection. Try again") from None
    raise ClusterError(
        f"The head at {address} must answer within {seconds:g} s. Received: nothing. Try again"
    )


def answers_as_head(address: str, token: str) -> bool:
    """Return whether a head answers at an address."""
    try:
        ask_head(address, token, {"do": "nodes"}, _ANSWER_SECONDS, connect_seconds=_ANSWER_SECONDS)
    except ClusterError:
        return False
    return True


def open_listener(host: str, port: int) -> socket.socket:
    """Listen at a numeric address; port 0: the system chooses. Raises ClusterError if it is taken."""
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"The head needs an address that is its own. Received: {format_address(host, port)} "
            f"({error.strerror}). End the program that has it, or choose another by --interface and --port"
        ) from error
    return listener


class Acceptor:
    """Accepts callers and does their handshakes, without waiting for any."""

    def __init__(self, listener: socket.socket, token: str, own_info: PeerInfo) -> None:
        self._listener = listener
        self._token = token.encode()
        self._own_info = own_info
        self._settings = dataclasses.replace(read_tls_settings(), mode="always")
        #: Handshakes under way, the oldest first, by descriptor.
        self.pending: dict[int, SocketHandshake] = {}
        #: When callers are accepted again, of the monotonic clock. Written by `accept`.
        self._accept_at = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether no caller is accepted now: the process had no descriptor for the last one."""
        return time.monotonic() < self._accept_at

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> None:
        """Accept the callers that wait."""
        for _ in range(_MAX_HANDSHAKES):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._accept_at = time.monotonic() + _ACCEPT_PAUSE
                return
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                _configure(connection)
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            handshake = SocketHandshake(
                connection, self._token, self._own_info, self._settings, dialled=False, deadline=deadline
            )
            self.pending[handshake.fileno()] = handshake
            if len(self.pending) > _MAX_HANDSHAKES:
                self.drop(next(iter(self.pending)))

    def advance(self, descriptor: int) -> tuple[Channel, PeerInfo] | None:
        """Continue with a handshake. Return the connection and what the caller says once it is done."""
        handshake = self.pending[descriptor]
        try:
            if not handshake.advance():
                return None
        except (OSError, ExchangeError, ValueError) as error:
            handshake.send_answer(error)
            self.drop(descriptor)
            return None
        del self.pending[descriptor]
        caller = handshake.peer_info or {}
        if caller.get("room") != ROOM:
            handshake.socket.close()
            return None
        return Channel(handshake.socket, MAX_LINE_BYTES), caller

    def drop(self, descriptor: int) -> None:
        self.pending.pop(descriptor).socket.close()

    def list_late(self) -> Iterator[int]:
        """Yield the handshakes whose time is up."""
        now = time.monotonic()
        yield from [fd for fd, handshake in self.pending.items() if handshake.deadline < now]

    def close(self) -> None:
        for descriptor in list(self.pending):
            self.drop(descriptor)
        self._listener.close()


def check_role(info: PeerInfo) -> str:
    """Return the role of a caller. Raises InputError for one that there isn't."""
    role = info.get("role")
    if role not in ("agent", "client"):
        raise InputError(f"A caller of the head is an agent or a client. Received: {role!r}")
    return str(role)


def say_farewell(channel: Channel, seconds: float) -> None:
    """Tell the head that this agent ends, and wait until it has heard it: it closes the connection then.

    Closed from this side while something unread is here, the connection would be reset, and the word lost.
    """
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChannelClosed):
        channel.send({"do": "leave"})
        while (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent_bytes else 0))
            poll.poll(left * 1000)
            channel.flush()
            channel.receive()
    channel.close()
