"""What two peers say to each other before they trust each other. Nothing here opens a socket.

    dialler                                   acceptor
    GREETING, nonce                     ->
                                        <-    GREETING, nonce, proof("accept")
    proof("dial"), sealed card          ->
                                        <-    sealed card

A proof is HMAC-SHA256 with the job's secret over the role and both nonces; a card (JSON: rank, sizes,
shards, generation ...) is sealed with a key derived the same way. Every length is fixed or bounded, and a
peer that fails at any point has learnt nothing but nonces. The connection isn't encrypted: this keeps
strangers out, not somebody who can rewrite packets on the wire.
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
HandshakeSteps = Generator[int | bytes, bytes, PeerInfo]
"""Yields bytes to send, or a number of bytes to be sent in; returns the peer's card."""

GREETING = b"insitu\x00\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32
CARD_LIMIT = 1 << 16
_LENGTH = struct.Struct("!I")


class Handshake:
    """One talk under way, whatever carries its bytes: `out` is to be sent, `missing` bytes are waited for.

    `card` is the peer's once it has proved itself; the talk is over when `out` is empty, too.
    """

    def __init__(self, talk: HandshakeSteps) -> None:
        self.out = b""
        self.card: PeerInfo | None = None
        self._talk = talk
        self._in = b""
        self._wanted = 0
        self._advance(None)

    @property
    def missing(self) -> int:
        return self._wanted - len(self._in)

    def sent(self, count: int) -> None:
        """The first `count` bytes of `out` are on their way."""
        self.out = self.out[count:]

    def received(self, data: bytes) -> None:
        """`missing` bytes at most have come. Raises ExchangeError or ValueError for what no peer says."""
        self._in += data
        if not self.missing:
            complete, self._in = self._in, b""
            self._advance(complete)

    def _advance(self, data: bytes | None) -> None:
        try:
            step = next(self._talk) if data is None else self._talk.send(data)
            while isinstance(step, bytes):
                self.out += step
                step = next(self._talk)
            self._wanted = step
        except StopIteration as end:
            self.card = end.value


class ProtocolError(ExchangeError):
    """What answers there doesn't speak this protocol."""


def check_secret(secret: object) -> None:
    """Raises InputError for what can't be proved."""
    if not isinstance(secret, bytes):
        raise InputError(f"secret must be bytes. Received: {type(secret).__name__}")


def _proof(secret: bytes, role: bytes, dialled: bytes, accepted: bytes) -> bytes:
    return hmac.new(secret, b"insitu " + role + b"\0" + dialled + accepted, hashlib.sha256).digest()


def _seal(key: bytes, card: PeerInfo) -> bytes:
    body = json.dumps(card).encode()
    if len(body) > CARD_LIMIT:
        raise ExchangeError(f"A card has {CARD_LIMIT} bytes at most. Received: {len(body)}")
    return _LENGTH.pack(len(body)) + hmac.new(key, body, hashlib.sha256).digest() + body


def _read_card(key: bytes) -> HandshakeSteps:
    head = yield _LENGTH.size + PROOF_BYTES
    (length,) = _LENGTH.unpack_from(head)
    if length > CARD_LIMIT:
        raise ProtocolError(f"A card has {CARD_LIMIT} bytes at most. Received: {length}")
    body = yield length
    if not hmac.compare_digest(head[_LENGTH.size :], hmac.new(key, body, hashlib.sha256).digest()):
        raise AuthenticationError("A peer's card was changed on its way")
    card = json.loads(body)
    if not isinstance(card, dict):
        raise ProtocolError("A card must be a JSON object")
    return card


def dial(secret: bytes, card: PeerInfo) -> HandshakeSteps:
    """The side that opened the connection."""
    mine = secrets.token_bytes(NONCE_BYTES)
    yield GREETING + mine
    answer = yield len(GREETING) + NONCE_BYTES + PROOF_BYTES
    if not answer.startswith(GREETING):
        raise ProtocolError("What answers is not an exchange of this version of insitu")
    theirs, proof = answer[len(GREETING) : -PROOF_BYTES], answer[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"accept", mine, theirs)):
        raise AuthenticationError("It doesn't know this job's secret, or this process doesn't")
    yield _proof(secret, b"dial", mine, theirs) + _seal(_proof(secret, b"dial card", mine, theirs), card)
    return (yield from _read_card(_proof(secret, b"accept card", mine, theirs)))


def accept(secret: bytes, card: PeerInfo) -> HandshakeSteps:
    """The side that was called. Tells a stranger nothing but a nonce and a proof over the stranger's own."""
    greeting = yield len(GREETING) + NONCE_BYTES
    if not greeting.startswith(GREETING):
        raise ProtocolError("The caller is not an exchange of this version of insitu")
    theirs, mine = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    yield GREETING + mine + _proof(secret, b"accept", theirs, mine)
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(secret, b"dial", theirs, mine)):
        raise AuthenticationError("The caller doesn't know this job's secret")
    peer = yield from _read_card(_proof(secret, b"dial card", theirs, mine))
    yield _seal(_proof(secret, b"accept card", theirs, mine), card)
    return peer
