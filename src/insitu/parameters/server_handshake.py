"""The beginning of a connection: both sides prove the job's secret before either is believed anything."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from insitu._version import __version__
from insitu.errors import ExchangeError, VersionMismatch
from insitu.exchange import handshake, memory
from insitu.exchange.rendezvous import parse_address
from insitu.parameters.wire import PROTOCOL

PATIENCE = 5.0
"""Seconds that a caller has for its handshake."""


def card(role: str, index: int, **more: Any) -> handshake.Card:
    """What this process says of itself: "worker" or "server" `index`."""
    return {
        "room": "parameters",
        "role": role,
        "index": index,
        "process": os.getpid(),
        "host": memory.host_identity() if memory.supported() else "",
        "version": __version__,
        "protocol": PROTOCOL,
        **more,
    }


def check_card(theirs: handshake.Card) -> None:
    """Raises VersionMismatch where the other side speaks another protocol, ExchangeError where it isn't of
    parameter servers at all."""
    if theirs.get("room") != "parameters":
        raise ExchangeError("What answers there belongs to the job, but not to its parameter servers")
    if theirs.get("protocol") != PROTOCOL:
        raise VersionMismatch(
            f"All tasks of a job need the same version of insitu: this process has {__version__} (protocol "
            f"{PROTOCOL}), {theirs.get('role')} {theirs.get('index')} has {theirs.get('version')} (protocol "
            f"{theirs.get('protocol')})"
        )


class SocketHandshake:
    """One handshake under way on one non-blocking connection."""

    def __init__(self, connection: socket.socket, talk: handshake.Talk) -> None:
        self.socket = connection
        self.deadline = time.monotonic() + PATIENCE
        self._talk = handshake.Conversation(talk)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def card(self) -> handshake.Card | None:
        return self._talk.card

    @property
    def sending(self) -> bool:
        return bool(self._talk.out)

    def go_on(self) -> bool:
        """Moves what can be moved; returns whether it is done. Raises OSError, ExchangeError, ValueError."""
        try:
            self._flush()
            while self.card is None:
                data = self.socket.recv(self._talk.missing)
                if not data:
                    raise ConnectionError("it hung up before it had proved itself")
                self._talk.received(data)
                self._flush()
        except BlockingIOError:
            return False
        return True

    def _flush(self) -> None:
        while self._talk.out:
            self._talk.sent(self.socket.send(self._talk.out))


def call(
    address: str, secret: bytes, mine: handshake.Card, deadline: float
) -> tuple[socket.socket, handshake.Card]:
    """Connects to a server: (connection, what it says of itself). Waits until `deadline` (monotonic) at most.

    Raises OSError where nobody answers, AuthenticationError, VersionMismatch, ExchangeError.
    """
    host, port = parse_address(address, lowest=0)
    connection = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
    try:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError("nobody listens there yet")
        connection.setblocking(False)
        greeting = SocketHandshake(connection, handshake.dial(secret, mine))
        while not greeting.go_on():
            left = min(deadline, greeting.deadline) - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{address} doesn't answer the handshake")
            poll = select.poll()
            poll.register(connection, select.POLLOUT if greeting.sending else select.POLLIN)
            poll.poll(left * 1000)
    except ConnectionError as error:
        connection.close()
        raise ConnectionRefusedError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    theirs = greeting.card or {}
    try:
        check_card(theirs)
    except BaseException:
        connection.close()
        raise
    return connection, theirs
