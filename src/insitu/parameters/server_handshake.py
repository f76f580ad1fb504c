"""The handshake of a connection: both sides prove the job's secret before either trusts the other."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from insitu.errors import ExchangeError, VersionMismatch
from insitu.exchange import (
    PROTOCOL_KEYS,
    HandshakeSteps,
    PeerInfo,
    connect_within,
    describe_protocol,
    handshake,
    memory,
    parse_address,
    warn_about_plain_text,
)
from insitu.parameters.rules import PROTOCOL_VERSION

_MODULES = (
    "connection",
    "memory_receiver",
    "rules.hashing",
    "rules.modes",
    "rules.sharding_plan",
    "rules.wire",
)
"""The modules whose constants shape what workers and servers send each other."""
HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a peer has to complete the handshake."""


def make_peer_info(role: str, index: int, **more: Any) -> PeerInfo:
    """Return the description that this process, `role` ("worker" or "server") and `index`, sends to peers."""
    return {
        "room": "parameters",
        "role": role,
        "index": index,
        "process": os.getpid(),
        "host": memory.read_host_identity() if memory.is_supported() else "",
        "protocol": PROTOCOL_VERSION,
        **describe_protocol("insitu.parameters", _MODULES),
        **more,
    }


def check_peer_info(peer: PeerInfo) -> None:
    """Raise VersionMismatch where the peer uses another protocol version, ExchangeError where it doesn't
    belong to parameter servers."""
    if peer.get("room") != "parameters":
        raise ExchangeError(
            f"A peer must be a task that uses parameter servers. Received: a peer of {peer.get('room')!r}. "
            "Check that the addresses are those of the job's ps tasks"
        )
    own = {"protocol": PROTOCOL_VERSION, **describe_protocol("insitu.parameters", _MODULES)}
    for key in ("protocol", *PROTOCOL_KEYS):
        if peer.get(key) != own[key]:
            raise VersionMismatch(
                f"All tasks of a job need the same version of insitu on machines of one kind: their {key} "
                f"must be "
                f"equal. Received: {own[key]!r} here, {peer.get(key)!r} from {peer.get('role')} "
                f"{peer.get('index')}. Install the same version on all nodes"
            )


class SocketHandshake:
    """One handshake under way on one non-blocking socket."""

    def __init__(self, connection: socket.socket, steps: HandshakeSteps) -> None:
        #: The socket; the caller's again once the handshake is done.
        self.socket = connection
        #: Time on the monotonic clock by which the handshake must be done; the caller enforces it.
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self._protocol = handshake.Handshake(steps)

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def peer_info(self) -> PeerInfo | None:
        """The peer's description once it has proved the secret; None before."""
        return self._protocol.info

    @property
    def has_unsent(self) -> bool:
        """True while the handshake waits for the socket to become writable."""
        return bool(self._protocol.out)

    def advance(self) -> bool:
        """Send and receive without waiting. Return whether the handshake is done.

        Raises OSError, ExchangeError, ValueError.
        """
        try:
            self._flush()
            while self.peer_info is None:
                data = self.socket.recv(self._protocol.missing)
                if not data:
                    raise ConnectionError("the peer closed the connection before the handshake was done")
                self._protocol.received(data)
                self._flush()
        except BlockingIOError:
            return False
        return True

    def _flush(self) -> None:
        while self._protocol.out:
            self._protocol.sent(self.socket.send(self._protocol.out))


def connect_to_server(
    address: str, secret: bytes, own_info: PeerInfo, deadline: float, limit: float = HANDSHAKE_TIMEOUT
) -> tuple[socket.socket, PeerInfo]:
    """Connect to a server and do the handshake. Return (socket, the server's description).

    Waits until `deadline` (monotonic) at most, and `limit` seconds each for the host's name to be known and
    for the host to accept the connection. Raises OSError where nobody answers, AuthenticationError,
    VersionMismatch, ExchangeError.
    """
    host, port = parse_address(address, lowest=0)
    seconds = min(limit, max(0.01, deadline - time.monotonic()))
    connection = connect_within(host, port, seconds)
    try:
        if connection.getsockname() == connection.getpeername():
            # Linux connects a socket to itself where the port is free and was drawn as the local one.
            raise ConnectionRefusedError("nobody listens there yet")
        connection.setblocking(False)
        socket_handshake = SocketHandshake(connection, handshake.dial(secret, own_info))
        while not socket_handshake.advance():
            left = min(deadline, socket_handshake.deadline) - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{address} didn't complete the handshake in time")
            poll = select.poll()
            poll.register(connection, select.POLLOUT if socket_handshake.has_unsent else select.POLLIN)
            poll.poll(left * 1000)
        peer = socket_handshake.peer_info or {}
        check_peer_info(peer)
        warn_about_plain_text(connection)
    except ConnectionError as error:
        connection.close()
        raise ConnectionRefusedError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection, peer
