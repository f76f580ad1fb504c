"""One connection to a server of Ignite. Every wait has a deadline, every message a bounded size."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time

import numpy as np

from insitu.base.errors import SourceError
from insitu.extensions.ignite.address import ConnectionSettings, HostPort, format_server
from insitu.extensions.ignite.protocol import (
    AUTHENTICATION_FAILED,
    INVALID_NODE_STATE,
    NO_SUCH_CACHE,
    SECURITY_VIOLATION,
    Handshake,
    Response,
    TopologyVersion,
    decode_handshake,
    decode_response,
    encode_handshake,
    encode_request,
)
from insitu.extensions.ignite.wire import Malformed

MOST_MESSAGE_BYTES = 256 << 20
"""Bytes of the largest response that is taken in."""
_MOST_HANDSHAKE_BYTES = 1 << 16
_MOST_CONNECT_SECONDS = 10.0
_SLOWEST = 1 << 20
"""Bytes a second at which a response comes in at least, beside the timeout."""
_LENGTH = struct.Struct("<i")
_RECEIVED_AT_ONCE = 8 << 20


class ConnectionFailed(Exception):
    """Raised where a server can't be reached, or the connection to it is of no use any more."""


class ServerFailure(Exception):
    """Raised where a server says that a request has failed. `status` says how."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class TooLarge(Exception):
    """Raised for a response of more than MOST_MESSAGE_BYTES; the connection is of no use any more."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Connection:
    """A connection that has made its handshake. One thread uses it at a time."""

    def __init__(self, server: HostPort, settings: ConnectionSettings) -> None:
        """Connect. Raises ConnectionFailed, and SourceError where another attempt would fail, too."""
        self.server, self.name = server, format_server(server)
        self.topology: TopologyVersion | None = None
        """The last topology version that the server has said."""
        self._timeout = settings.timeout
        self._requests = 0
        self._waiting: set[int] = set()
        self._early: dict[int, tuple[Response, memoryview]] = {}
        """Responses that came before those of earlier requests."""
        self._socket = self._connect(settings)
        try:
            self.handshake = self._shake_hands(settings)
        except BaseException:
            self.close()
            raise

    def _connect(self, settings: ConnectionSettings) -> socket.socket:
        timeout = min(self._timeout, _MOST_CONNECT_SECONDS)
        try:
            plain = socket.create_connection(self.server, timeout)
        except (OSError, UnicodeError) as error:
            raise ConnectionFailed(f"{self.name} can't be reached: {_reason(error)}") from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if settings.tls is None:
                return plain
            return settings.tls.wrap_socket(plain, server_hostname=settings.server_name or self.server[0])
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise SourceError(
                f"The certificate of a server must be of a trusted authority and for the server's name. "
                f"Received: from {self.name} one with which {error.verify_message}. Name the authority by "
                f"INSITU_IGNITE_CA, and the name in the certificates by INSITU_IGNITE_SERVER_NAME"
            ) from None
        except OSError as error:
            plain.close()
            raise ConnectionFailed(
                f"{self.name} doesn't speak TLS, or not with this certificate ({_reason(error)}). If it has "
                f"no TLS, set INSITU_IGNITE_TLS=0; if it wants a certificate, name it by INSITU_IGNITE_CERT"
            ) from None

    def _shake_hands(self, settings: ConnectionSettings) -> Handshake:
        deadline = time.monotonic() + self._timeout
        try:
            self._send(encode_handshake(settings.user, settings.password), deadline)
            head = self._receive_exactly(4, deadline)
            size = _LENGTH.unpack(head)[0]
            if not 1 <= size <= _MOST_HANDSHAKE_BYTES:
                raise ConnectionFailed(
                    f"{self.name} is no server of Ignite: it answers {_quote(bytes(head))}"
                )
            answer = decode_handshake(self._receive_exactly(size, deadline))
        except Malformed as error:
            raise ConnectionFailed(f"{self.name} is no server of Ignite: {error}") from None
        except ConnectionFailed as error:
            if settings.tls is None and "has closed" in str(error):
                raise ConnectionFailed(
                    f"{error} at the handshake. If it speaks TLS, name its authority by INSITU_IGNITE_CA"
                ) from None
            if settings.tls is not None:  # a server of TLS 1.3 refuses a client after its own handshake
                raise ConnectionFailed(
                    f"{error} at the handshake. If it wants a certificate, name it by INSITU_IGNITE_CERT"
                ) from None
            if "deadline" in str(error):  # such as of a web server, which waits for the end of a line
                raise ConnectionFailed(
                    f"{error} at the handshake. Look whether another program listens there"
                ) from None
            raise
        if answer.refusal:
            self._raise_refusal(answer, settings)
        return answer

    def _raise_refusal(self, answer: Handshake, settings: ConnectionSettings) -> None:
        if answer.status == AUTHENTICATION_FAILED or "uthenticat" in answer.refusal:
            received = "another user or password" if settings.user else "no user"
            raise SourceError(
                f"The cluster wants a user and a password. Received: {received} for {self.name} "
                f"({answer.refusal[:200]}). Set INSITU_IGNITE_USERNAME and INSITU_IGNITE_PASSWORD, or "
                f"INSITU_IGNITE_CREDENTIALS"
            )
        if answer.status == INVALID_NODE_STATE or "recovery mode" in answer.refusal:
            raise ConnectionFailed(f"{self.name} doesn't serve yet: {answer.refusal[:200]}")
        raise SourceError(
            f"A server must accept the thin protocol 1.7 (Ignite 2.11 and later). Received: from {self.name} "
            f"{answer.refusal[:200]!r}"
        )

    def send(self, operation: int, contents: bytes) -> int:
        """Send a request. Returns its number. Raises ConnectionFailed."""
        self._requests += 1
        self._send(encode_request(operation, self._requests, contents), time.monotonic() + self._timeout)
        self._waiting.add(self._requests)
        return self._requests

    @property
    def is_idle(self) -> bool:
        """Whether every request has been answered."""
        return not self._waiting

    def receive(self, request: int) -> memoryview:
        """Return the contents of the response to a request.

        Raises ConnectionFailed, ServerFailure and TooLarge.
        """
        deadline = time.monotonic() + self._timeout
        while request not in self._early:
            size = _LENGTH.unpack(self._receive_exactly(4, deadline))[0]
            if size > MOST_MESSAGE_BYTES:
                raise TooLarge(size)
            if size < 10:
                raise ConnectionFailed(f"{self.name} sent a message of {size} bytes")
            body = self._receive_exactly(size, deadline + size / _SLOWEST)
            try:
                head = decode_response(body)
            except Malformed as error:
                raise ConnectionFailed(f"{self.name} sent a damaged message: {error}") from None
            if head.topology is not None:
                self.topology = head.topology
            if head.is_notification:
                continue
            if head.request not in self._waiting:
                raise ConnectionFailed(f"{self.name} answered request {head.request} instead of {request}")
            self._waiting.remove(head.request)
            self._early[head.request] = head, body
        head, body = self._early.pop(request)
        if head.status:
            raise ServerFailure(head.status, head.message)
        return body[head.start :]

    def request(self, operation: int, contents: bytes) -> memoryview:
        """Send a request and return the contents of its response. Raises as `receive` does."""
        return self.receive(self.send(operation, contents))

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionFailed(f"{self.name} takes nothing in: {_reason(error)}") from None

    def _receive_exactly(self, size: int, deadline: float) -> memoryview:
        """Return the next `size` bytes. Raises ConnectionFailed."""
        # Not a bytearray, whose bytes would be set to zero first.
        data = memoryview(np.empty(size, np.uint8).data)
        done = 0
        try:
            while done < size:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
                count = self._socket.recv_into(data[done : done + _RECEIVED_AT_ONCE])
                if not count:
                    raise ConnectionFailed(
                        f"{self.name} has closed the connection after {done} of {size} bytes of a message"
                    )
                done += count
        except TimeoutError:
            raise ConnectionFailed(
                f"{self.name} sent {done} of {size} bytes of a message and then nothing until its deadline "
                f"(INSITU_IGNITE_TIMEOUT)"
            ) from None
        except OSError as error:
            raise ConnectionFailed(f"{self.name} has closed the connection: {_reason(error)}") from None
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def raise_final(failure: ServerFailure, cache: str) -> None:
    """Raise SourceError for a failure that no other attempt would avoid."""
    if failure.status == NO_SUCH_CACHE:
        raise SourceError(f"Cache {cache} must exist in Ignite. Received: {failure.message[:200]!r}")
    if failure.status in (SECURITY_VIOLATION, AUTHENTICATION_FAILED):
        raise SourceError(
            f"The user must be allowed to read cache {cache}. Received: {failure.message[:200]!r}. Give the "
            f"user the permission CACHE_READ, or set INSITU_IGNITE_USERNAME"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer until the deadline"
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def _quote(head: bytes) -> str:
    if head == b"HTTP":
        return "as a web server does (HTTP)"
    if head[:1] == b"\x15":
        return "with an alert of TLS: name its authority by INSITU_IGNITE_CA"
    return repr(head)
