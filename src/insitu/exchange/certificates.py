"""Makes a key pair and a self-signed certificate for TLS. Nothing here opens a socket or a file.

`ssl` can use certificates, but can't make them. The one thing that is computed here is the public point of a
random P-256 key, and a signature that nobody relies on. OpenSSL checks that both parts of the key belong
together when it loads them, and does all the rest.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import textwrap
from dataclasses import dataclass, field

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
"""The field, the order and the generator of the curve P-256."""
_BYTES = 32
FOREVER = ("20000101000000Z", "99991231235959Z")
"""A validity without limits: peers recognize the certificate itself, and clocks of hosts may differ."""

_Point = tuple[int, int] | None
"""A point of the curve; None is the point at infinity."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key."""

    #: The certificate as DER.
    der: bytes
    #: The private key as PEM.
    key_pem: str = field(repr=False)

    @property
    def pem(self) -> str:
        """The certificate as PEM."""
        return _to_pem("CERTIFICATE", self.der)


def make_certificate(name: str = "insitu", validity: tuple[str, str] = FOREVER) -> Certificate:
    """Return a new key pair with a self-signed certificate. `validity` are two times as YYYYMMDDHHMMSSZ."""
    private = 1 + secrets.randbelow(_N - 1)
    public = _to_bytes(_multiply(private, _G))
    curve = _oid("1.2.840.10045.3.1.7")
    algorithm = _sequence(_oid("1.2.840.10045.4.3.2"))  # ECDSA with SHA-256
    subject = _sequence(_tagged(0x31, _sequence(_oid("2.5.4.3"), _tagged(0x0C, name.encode()))))
    body = _sequence(
        _tagged(0xA0, _integer(2)),  # version 3
        _integer(1 + secrets.randbits(63)),
        algorithm,
        subject,
        _sequence(*(_tagged(0x18, time.encode()) for time in validity)),
        subject,
        _sequence(_sequence(_oid("1.2.840.10045.2.1"), curve), _bits(public)),
    )
    der = _sequence(body, algorithm, _bits(_sign(private, body)))
    key = _sequence(_integer(1), _tagged(0x04, private.to_bytes(_BYTES, "big")), _tagged(0xA0, curve))
    return Certificate(der, _to_pem("EC PRIVATE KEY", key))


# The curve


def _add(first: _Point, second: _Point) -> _Point:
    if first is None or second is None:
        return first or second
    (x1, y1), (x2, y2) = first, second
    if x1 == x2:
        if (y1 + y2) % _P == 0:
            return None
        slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, _P)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _P)
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _multiply(factor: int, point: _Point) -> tuple[int, int]:
    """Return factor * point by Montgomery's ladder, which takes the same steps for each bit."""
    low: _Point = None
    high = point
    for bit in range(_N.bit_length() - 1, -1, -1):
        both = _add(low, high)
        if factor >> bit & 1:
            low, high = both, _add(high, high)
        else:
            low, high = _add(low, low), both
    if low is None:
        raise ValueError("a multiple of the order has no coordinates")
    return low


def _sign(private: int, data: bytes) -> bytes:
    """Return the ECDSA signature of data as DER."""
    digest = int.from_bytes(hashlib.sha256(data).digest(), "big")
    while True:
        nonce = 1 + secrets.randbelow(_N - 1)
        r = _multiply(nonce, _G)[0] % _N
        s = pow(nonce, -1, _N) * (digest + r * private) % _N
        if r and s:
            return _sequence(_integer(r), _integer(s))


def _to_bytes(point: tuple[int, int]) -> bytes:
    """Return the uncompressed form of a point."""
    return b"\x04" + b"".join(number.to_bytes(_BYTES, "big") for number in point)


# DER


def _tagged(tag: int, content: bytes) -> bytes:
    length = len(content)
    if length < 128:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    """Return a number that isn't negative: its first bit is 0."""
    return _tagged(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(content: bytes) -> bytes:
    return _tagged(0x03, b"\0" + content)


def _oid(text: str) -> bytes:
    first, second, *rest = map(int, text.split("."))
    content = bytes([40 * first + second])
    for number in rest:
        septets = [number & 0x7F]
        while number := number >> 7:
            septets.append(0x80 | number & 0x7F)
        content += bytes(reversed(septets))
    return _tagged(0x06, content)


def _to_pem(label: str, der: bytes) -> str:
    lines = "\n".join(textwrap.wrap(base64.b64encode(der).decode(), 64))
    return f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n"
