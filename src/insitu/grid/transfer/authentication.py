"""Who may read and write: processes that have the cluster's secret.

The secret itself is never sent. What is sent, inside of TLS to the server whose certificate is pinned, is a
token that follows from it. Before that callers show a certificate that only who has the secret can make: a
request is in the server's memory as a whole before it sees the token.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pyarrow.flight as flight

from insitu.base.errors import InputError
from insitu.base.net.certificates import Credentials, make_credentials

MIN_SECRET_BYTES = 16
_PURPOSE = b"insitu transfer of partitions 1"
_AUTHORITY_PURPOSE = b"insitu transfer of partitions 1, authority"
_HEADER = "authorization"


def derive_token(secret: bytes) -> str:
    """Return what callers send. Raises InputError for a secret that could be guessed."""
    _check_secret(secret)
    return hmac.new(secret, _PURPOSE, hashlib.sha256).hexdigest()


def derive_credentials(secret: bytes) -> Credentials:
    """Return what callers show in TLS, and servers ask for. Raises InputError as `derive_token` does."""
    _check_secret(secret)
    return make_credentials(hmac.new(secret, _AUTHORITY_PURPOSE, hashlib.sha256).digest())


def _check_secret(secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise InputError(
            f"The cluster's secret has {MIN_SECRET_BYTES} bytes at least. Received: {len(secret)}. Make one "
            f"with secrets.token_bytes(32)"
        )


def make_headers(secret: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that a caller sends."""
    return [(_HEADER.encode(), f"Bearer {derive_token(secret)}".encode())]


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without the token, before the server sees them."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._expected = f"Bearer {derive_token(secret)}".encode()

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        """Raise FlightUnauthenticatedError unless the call carries the token."""
        found = headers.get(_HEADER, [])
        right = False
        for value in found:
            given = value.encode(errors="replace") if isinstance(value, str) else bytes(value)
            right |= hmac.compare_digest(given, self._expected)
        if not right or len(found) != 1:
            raise flight.FlightUnauthenticatedError("the caller doesn't know the cluster's secret")
