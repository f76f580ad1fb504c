"""The handshake of two peers: each proves that it knows the job's secret. Nothing here opens a socket.

    dialler                                   acceptor
    MAGIC, nonce                        ->
                                        <-    MAGIC, nonce, proof("accept")
    proof("dial"), sealed info          ->
                                        <-    sealed info

A proof is HMAC-SHA256 with the job's secret over the role and both nonces. A peer's info (JSON: rank, sizes,
shards, generation ...) is sealed with a key that is derived the same way. Every length is fixed or bounded. A
peer that fails at any point has learnt only nonces. The connection isn't encrypted: this keeps strangers out,
but not somebody who can rewrite packets on the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Generator
from typing import Any

from insitu.errors import AuthenticationError, ExchangeError, InputError

PeerInfo = dict[str, Any]
"""The facts that a peer sends about itself, as a JSON object."""
HandshakeSteps = Generator[int | bytes, bytes, PeerInfo]
"""Yields bytes to send, or the number of bytes to receive next; returns the peer's info."""

MAGIC = b"insitu\x00\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32
INFO_LIMIT = 1 << 16
"""Bytes of a peer's info at most."""
_LENGTH = struct.Struct("!I")


class Handshake:
    """One handshake under way, whatever carries its bytes. It is over when `info` is set and `out` is
    empty."""

    def __init__(self, steps: HandshakeSteps) -> None:
        #: The bytes to send.
        self.out = b""
        #: The peer's info, once it has proved that it knows the secret.
        self.info: PeerInfo | None = None
        self._steps = steps
        self._in = b""
        self._wanted = 0
        self._advance(None)

    @property
    def missing(self) -> int:
        """The number of bytes to receive next."""
        return self._wanted - len(self._in)

    def sent(self, count: int) -> None:
        """Remove the first `count` bytes of `out`, which have been sent."""
        self.out = self.out[count:]

    def received(self, data: bytes) -> None:
        """Take `missing` bytes at most. Raises ExchangeError or ValueError for bytes that no peer sends."""
        self._in += data
        if not self.missing:
            complete, self._in = self._in, b""
            self._advance(complete)

    def _advance(self, data: bytes | None) -> None:
        try:
            step = next(self._steps) if data is None else self._steps.send(data)
            while isinstance(step, bytes):
                self.out += step
                step = next(self._steps)
            self._wanted = step
        except StopIteration as end:
            self.info = end.value


class ProtocolError(ExchangeError):
    """The other end doesn't speak this protocol."""


def check_secret(secret: object) -> None:
    """Raise InputError if `secret` isn't bytes."""
    if not isinstance(secret, bytes):
        raise InputError(f"secret must be bytes. Received: {type(secret).__name__}")


def _prove(secret: bytes, role: bytes, dialled: bytes, accepted: bytes) -> bytes:
    return hmac.new(secret, b"insitu " + role + b"\0" + dialled + accepted, hashlib.sha256).digest()


def _wrong_secret_error() -> AuthenticationError:
    return AuthenticationError(
        "Both peers must know the job's secret, but the peer doesn't know this job's secret, or this process "
        "doesn't. Pass the same secret to both"
    )


def _seal(key: bytes, info: PeerInfo) -> bytes:
    body = json.dumps(info).encode()
    if len(body) > INFO_LIMIT:
        raise ExchangeError(
            f"A peer's info must have {INFO_LIMIT} bytes at most. Received: {len(body)}. "
            "Use fewer shards per rank"
        )
    return _LENGTH.pack(len(body)) + hmac.new(key, body, hashlib.sha256).digest() + body


def _read_info(key: bytes) -> HandshakeSteps:
    head = yield _LENGTH.size + PROOF_BYTES
    (length,) = _LENGTH.unpack_from(head)
    if length > INFO_LIMIT:
        raise ProtocolError(
            f"A peer's info must have {INFO_LIMIT} bytes at most. Received: {length}. "
            "Check that the address is that of a rank"
        )
    body = yield length
    if not hmac.compare_digest(head[_LENGTH.size :], hmac.new(key, body, hashlib.sha256).digest()):
        raise AuthenticationError(
            "A peer's info must arrive unchanged, but it was changed on its way. "
            "Check the network between the two hosts"
        )
    info = json.loads(body)
    if not isinstance(info, dict):
        raise ProtocolError(f"A peer's info must be a JSON object. Received: {info!r:.100}")
    return info


def dial(secret: bytes, info: PeerInfo) -> HandshakeSteps:
    """Run the side that opened the connection."""
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + own_nonce
    answer = yield len(MAGIC) + NONCE_BYTES + PROOF_BYTES
    if not answer.startswith(MAGIC):
        raise ProtocolError(
            f"A peer must run this version of insitu. Received: {answer[: len(MAGIC)]!r}. "
            "Check that the address is that of a rank, and the versions"
        )
    nonce, proof = answer[len(MAGIC) : -PROOF_BYTES], answer[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _prove(secret, b"accept", own_nonce, nonce)):
        raise _wrong_secret_error()
    sealed = _seal(_prove(secret, b"dial card", own_nonce, nonce), info)
    yield _prove(secret, b"dial", own_nonce, nonce) + sealed
    return (yield from _read_info(_prove(secret, b"accept card", own_nonce, nonce)))


def accept(secret: bytes, info: PeerInfo) -> HandshakeSteps:
    """Run the side that was called. A stranger learns only a nonce and a proof over its own nonce."""
    opening = yield len(MAGIC) + NONCE_BYTES
    if not opening.startswith(MAGIC):
        raise ProtocolError(
            f"A peer must run this version of insitu. Received: {opening[: len(MAGIC)]!r}. "
            "Check the versions of all tasks"
        )
    nonce, own_nonce = opening[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + own_nonce + _prove(secret, b"accept", nonce, own_nonce)
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _prove(secret, b"dial", nonce, own_nonce)):
        raise _wrong_secret_error()
    peer = yield from _read_info(_prove(secret, b"dial card", nonce, own_nonce))
    yield _seal(_prove(secret, b"accept card", nonce, own_nonce), info)
    return peer
