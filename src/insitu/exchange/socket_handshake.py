"""The handshake of one connection: first TLS when the connection leaves this host, then the proofs.

The side that dials decides by the address at the other end. The side that accepts sees by the first byte
whether a caller speaks TLS. It refuses plain text that must not be, and always allows TLS.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import selectors
import socket
import ssl
from collections.abc import Callable

from insitu.exchange.handshake import (
    MAGIC,
    NONCE_BYTES,
    TLS_ONLY,
    Handshake,
    HandshakeSteps,
    PeerInfo,
    Refusal,
    accept,
    dial,
    get_answer,
)
from insitu.exchange.tls import TLS_ENV, TlsSettings, compute_binding, load_identity
from insitu.exchange.tls_socket import TLS_FIRST_BYTE, TlsSocket


class SocketHandshake:
    """One handshake under way on one non-blocking socket."""

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        own_info: PeerInfo,
        settings: TlsSettings,
        *,
        dialled: bool,
        deadline: float,
    ) -> None:
        """`own_info`: the facts that this process sends about itself. `dialled`: it opened the connection."""
        #: The socket; the caller's again once the handshake is done. TLS puts another object in its place.
        self.socket = connection
        #: Time on the monotonic clock by which the handshake must be done; the caller enforces it.
        self.deadline = deadline
        #: True if this process opened the connection.
        self.dialled = dialled
        self._settings = settings
        side = dial if dialled else accept
        self._make_steps: Callable[[bytes], HandshakeSteps] = functools.partial(side, secret, own_info)
        #: The certificate that this connection shows, to which an acceptor's proofs are bound.
        self._binding = b""
        #: The proofs, once it is known whether the connection is encrypted.
        self._protocol: Handshake | None = None

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def peer_info(self) -> PeerInfo | None:
        """The facts that the peer sent about itself, once it has proved the secret; None before."""
        return self._protocol.info if self._protocol is not None else None

    @property
    def has_unsent(self) -> bool:
        """True while the handshake waits for the socket to become writable."""
        if isinstance(self.socket, TlsSocket) and self.socket.has_unsent:
            return True
        if self._protocol is not None:
            return bool(self._protocol.out)
        return self.dialled and not isinstance(self.socket, TlsSocket)

    @property
    def events(self) -> int:
        """The events that a selector waits for."""
        return selectors.EVENT_WRITE if self.has_unsent else selectors.EVENT_READ

    def advance(self) -> bool:
        """Send and receive without waiting. Return whether the handshake is done.

        Raises OSError, ExchangeError, ValueError.
        """
        try:
            protocol = self._protocol
            if protocol is None:
                protocol = self._protocol = Handshake(self._make_steps(self._secure()))
            self._flush(protocol)
            while protocol.info is None:
                data = self.socket.recv(protocol.missing)
                if not data:
                    raise ConnectionError(
                        "a peer disconnected during the handshake, as one with another secret does"
                    )
                protocol.received(data)
                self._flush(protocol)
        except BlockingIOError:
            return False
        if not isinstance(self.socket, TlsSocket):
            warn_about_plain_text(self.socket)
        return True

    def send_answer(self, error: Exception) -> None:
        """Send the peer the reason why the handshake failed, if there is one that it may know."""
        if answer := get_answer(error):
            with contextlib.suppress(OSError):
                self.socket.send(answer)

    def _flush(self, protocol: Handshake) -> None:
        while protocol.out:
            protocol.sent(self.socket.send(protocol.out))

    def _secure(self) -> bytes:
        """Do the handshake of TLS if the connection must be encrypted. Return what to bind the proofs to."""
        if not isinstance(self.socket, TlsSocket):
            if not (self._is_dialled_encrypted() if self.dialled else self._is_accepted_encrypted()):
                return b""
            identity = load_identity(self._settings)
            context = identity.client if self.dialled else identity.server
            self._binding = identity.binding
            self.socket = TlsSocket(self.socket, context, accepted=not self.dialled)
        try:
            if not self.socket.advance_handshake():
                raise BlockingIOError
        except BlockingIOError:
            raise
        except OSError as error:
            raise ConnectionError(self._describe_failure(error)) from error
        if self.dialled:
            return compute_binding(self.socket.get_peer_certificate())
        return self._binding

    def _is_dialled_encrypted(self) -> bool:
        """Return whether this process must speak TLS. Raises OSError if nobody is at the other end."""
        peer = self.socket.getpeername()
        if self.socket.getsockname() == peer:
            # Linux connects a socket to itself if the port is free and was drawn as the local one.
            raise ConnectionRefusedError("nobody listens there yet")
        return self._settings.must_encrypt(peer[0])

    def _is_accepted_encrypted(self) -> bool:
        """Return whether the caller speaks TLS. Raises Refusal for plain text that must not be."""
        first = self.socket.recv(1, socket.MSG_PEEK)
        if first == TLS_FIRST_BYTE or not first:
            return first == TLS_FIRST_BYTE
        host = self.socket.getpeername()[0]
        if not self._settings.must_encrypt(host):
            return False
        # The system resets a connection of which something stays unread, and the answer would be lost.
        words = self.socket.recv(len(MAGIC) + NONCE_BYTES)
        raise Refusal(
            f"A peer at {host} must encrypt its connection with {TLS_ENV}={self._settings.mode}. Received: "
            f"plain text. Set {TLS_ENV} to the same for all tasks, or leave it out",
            TLS_ONLY if words.startswith(MAGIC[:-1]) else b"",
        )

    def _describe_failure(self, error: OSError) -> str:
        reason = error.reason or str(error) if isinstance(error, ssl.SSLError) else str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"its certificate fails: {error.verify_message}"
        return (
            f"A peer must speak TLS 1.3 where a connection leaves this host. Received: {reason}. Check that "
            f"the address is that of a task of this job, and that {TLS_ENV} and the files that go with it "
            "are the same for all tasks"
        )


# Warns once that numbers leave this host unencrypted


_LOG = logging.getLogger("insitu")


def warn_about_plain_text(connection: socket.socket) -> None:
    """Log a warning, once per process, if a connection leads to another host."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        host = connection.getpeername()[0]
        own = connection.getsockname()[0]
        if host != own and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _warn_once()


@functools.cache
def _warn_once() -> None:
    _LOG.warning(
        "[insitu] Numbers between hosts go unencrypted, as INSITU_TLS=never asks, and who can change packets "
        "on the way can change them. Leave INSITU_TLS out, unless only these hosts share the network "
        "(docs/explanations/security.md)."
    )
