"""The handshake of a connection: both sides prove the job's secret before either trusts the other."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from insitu.base.errors import ExchangeError, VersionMismatch
from insitu.exchange import (
    PROTOCOL_KEYS,
    PeerInfo,
    SocketHandshake,
    connect_within,
    describe_protocol,
    memory,
    parse_address,
    read_tls_settings,
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
    """Raise VersionMismatch if the peer uses another protocol version, ExchangeError if it doesn't
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


def connect_to_server(
    address: str, secret: bytes, own_info: PeerInfo, deadline: float, limit: float = HANDSHAKE_TIMEOUT
) -> tuple[socket.socket, PeerInfo]:
    """Connect to a server and do the handshake. Return (socket, the server's description).

    Waits until `deadline` (monotonic) at most, and `limit` seconds each for the host's name to be known and
    for the host to accept the connection. Raises OSError if nobody answers, AuthenticationError,
    VersionMismatch, ExchangeError.
    """
    host, port = parse_address(address, lowest=0)
    seconds = min(limit, max(0.01, deadline - time.monotonic()))
    settings = read_tls_settings()
    connection = connect_within(host, port, seconds)
    connection.setblocking(False)
    limit_at = time.monotonic() + HANDSHAKE_TIMEOUT
    handshake = SocketHandshake(connection, secret, own_info, settings, dialled=True, deadline=limit_at)
    try:
        while not handshake.advance():
            left = min(deadline, handshake.deadline) - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{address} didn't complete the handshake in time")
            poll = select.poll()
            poll.register(handshake, select.POLLOUT if handshake.has_unsent else select.POLLIN)
            poll.poll(left * 1000)
        peer = handshake.peer_info or {}
        check_peer_info(peer)
    except ConnectionError as error:
        handshake.socket.close()
        raise ConnectionRefusedError(str(error)) from error
    except BaseException:
        handshake.socket.close()
        raise
    return handshake.socket, peer
