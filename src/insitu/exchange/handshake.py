"""The handshake of two peers: each proves that it knows the job's secret. Nothing here opens a socket.

    dialler                                   acceptor
    MAGIC, nonce                        ->
                                        <-    MAGIC, nonce
    proof("dial")                       ->
                                        <-    proof("accept"), sealed info
    sealed info                         ->

A proof is HMAC-SHA256 with the job's secret over the role and both nonces. The side that called proves itself
first, so a caller without the secret gets nothing that depends on it. A peer's info (JSON: version, rank,
sizes,
shards, generation ...) is sealed with a key that is derived the same way. Every length is fixed or bounded.

Between hosts all of it goes through TLS (`tls.py`). Then the proofs and keys are also over `binding`, the
digest of the acceptor's certificate: somebody between the two, who would have to show another one, can't pass
them on. In plain text it is empty: this keeps strangers out, but not somebody who can rewrite packets.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Generator
from typing import Any

from insitu.base.errors import AuthenticationError, ExchangeError, InputError

PeerInfo = dict[str, Any]
"""The facts that a peer sends about itself, as a JSON object."""
HandshakeSteps = Generator[int | bytes, bytes, PeerInfo]
"""Yields bytes to send, or the number of bytes to receive next; returns the peer's info."""

MAGIC = b"insitu\x00\x02"
"""The protocol and its version: the last byte is increased with each change of the handshake itself."""
NONCE_BYTES = 32
PROOF_BYTES = 32
INFO_LIMIT = 1 << 16
"""Bytes of a peer's info at most."""
INFO_DEPTH = 8
"""Objects and lists within each other in a peer's info at most."""
SECRET_BYTES = 16
"""Bytes of a secret at least. A shorter one can be found by trying."""
_REFUSED = b"insitu: wrong secret".ljust(PROOF_BYTES, b"\0")
"""Sent instead of a proof to a caller whose own is wrong, so that it can name the reason."""
TLS_ONLY = b"insitu: only with TLS".ljust(len(MAGIC) + NONCE_BYTES, b"\0")
"""Sent instead of a nonce to a caller that speaks plain text if that isn't allowed."""
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

    answer = b""
    """Bytes that inform the peer."""


class Refusal(AuthenticationError):
    """The peer's proof is wrong."""

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        #: Bytes that inform the peer.
        self.answer = answer


class InsecureSecret(bytes):
    """A secret that is too short, or empty, for a caller that wants it nevertheless: anybody may find it."""

    def __repr__(self) -> str:
        return "InsecureSecret(...)"


_process_secret = secrets.token_bytes(32)
"""The secret of groups and servers within this process and its forked children."""


def resolve_secret(secret: bytes | None) -> bytes:
    """Return `secret`, or for None one that only this process and its forked children know.

    Raises InputError unless it is bytes of sufficient length, or an InsecureSecret.
    """
    if secret is None:
        return _process_secret
    if not isinstance(secret, bytes):
        raise InputError(f"secret must be bytes. Received: {type(secret).__name__}")
    if len(secret) < SECRET_BYTES and not isinstance(secret, InsecureSecret):
        raise InputError(
            f"secret must have {SECRET_BYTES} bytes at least. Received: {len(secret)} bytes. Take "
            "secrets.token_bytes(32), the same for all tasks; within one process leave it out. To go without "
            "protection, pass insitu.exchange.InsecureSecret(...)"
        )
    return secret


def _prove(secret: bytes, role: bytes, dialled: bytes, accepted: bytes, binding: bytes) -> bytes:
    """Return a proof or key. The nonces have a fixed length, so no two sets of arguments are hashed alike."""
    text = b"insitu " + role + b"\0" + dialled + accepted + binding
    return hmac.new(secret, text, hashlib.sha256).digest()


def _wrong_secret_error(answer: bytes = b"") -> AuthenticationError:
    return Refusal(
        "Both peers must know the job's secret, but the peer doesn't know this job's secret, or this process "
        "doesn't, or somebody between them has put another certificate in place of the peer's. Pass the same "
        "secret to both",
        answer,
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
    return _parse_info(body)


def _parse_info(body: bytes) -> PeerInfo:
    """Return the JSON object. Raises ProtocolError for anything else."""
    depth = deepest = 0
    for byte in body:  # brackets within texts count, too: they only make the limit stricter
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    try:
        info = json.loads(body) if deepest <= INFO_DEPTH else None
    except ValueError:
        info = None
    if not isinstance(info, dict):
        raise ProtocolError(
            f"A peer's info must be a JSON object of {INFO_DEPTH} levels at most. Received: {body[:100]!r}. "
            "Check the versions of all tasks"
        )
    return info


def dial(secret: bytes, info: PeerInfo, binding: bytes = b"") -> HandshakeSteps:
    """Run the side that opened the connection. `binding`: of the acceptor's certificate."""
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + own_nonce
    answer = yield len(MAGIC) + NONCE_BYTES
    if answer == TLS_ONLY:
        raise AuthenticationError(
            "Both peers must encrypt their connection, or neither: the peer takes no plain text, as this "
            "process sends. Set INSITU_TLS to the same for all tasks, or leave it out"
        )
    _check_magic(answer)
    nonce = answer[len(MAGIC) :]
    yield _prove(secret, b"dial", own_nonce, nonce, binding)
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _prove(secret, b"accept", own_nonce, nonce, binding)):
        raise _wrong_secret_error()
    peer = yield from _read_info(_prove(secret, b"accept card", own_nonce, nonce, binding))
    yield _seal(_prove(secret, b"dial card", own_nonce, nonce, binding), info)
    return peer


def accept(secret: bytes, info: PeerInfo, binding: bytes = b"") -> HandshakeSteps:
    """Run the side that was called, whose certificate `binding` is of. A stranger learns only a nonce."""
    opening = yield len(MAGIC) + NONCE_BYTES
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    _check_magic(opening, MAGIC + own_nonce)
    nonce = opening[len(MAGIC) :]
    yield MAGIC + own_nonce
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _prove(secret, b"dial", nonce, own_nonce, binding)):
        raise _wrong_secret_error(_REFUSED)
    sealed = _seal(_prove(secret, b"accept card", nonce, own_nonce, binding), info)
    yield _prove(secret, b"accept", nonce, own_nonce, binding) + sealed
    return (yield from _read_info(_prove(secret, b"dial card", nonce, own_nonce, binding)))


def _check_magic(opening: bytes, answer: bytes = b"") -> None:
    """Raise ProtocolError unless the peer speaks this version of the handshake."""
    if not opening.startswith(MAGIC):
        known = opening.startswith(MAGIC[:-1])
        error = ProtocolError(
            f"A peer must run this version of insitu, whose handshake begins with {MAGIC!r}. Received: "
            f"{opening[: len(MAGIC)]!r}. Check that the address is that of a task, and the versions of all "
            f"tasks"
        )
        error.answer = answer if known else b""
        raise error


def get_answer(error: Exception) -> bytes:
    """Return the bytes that give the peer the reason of its failed handshake, sent before hanging up."""
    return error.answer if isinstance(error, Refusal | ProtocolError) else b""
