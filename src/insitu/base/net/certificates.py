"""Makes a key pair and a self-signed certificate for TLS. Nothing here opens a socket or a file."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

FOREVER = (datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
"""A validity without limits: peers recognize the certificate itself, and clocks of hosts may differ."""
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""How many points P-256 has: private keys are in [1, _ORDER)."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key."""

    #: The certificate as DER.
    der: bytes
    #: The certificate as PEM.
    pem: str
    #: The private key as PEM.
    key_pem: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificate that a member of a group shows in TLS, and by which the others recognize it."""

    #: The certificate of the group's authority as PEM. Each member makes it itself.
    authority: str
    #: One of this member's own, which that authority has signed.
    own: Certificate


def make_certificate(name: str = "insitu", validity: tuple[datetime, datetime] = FOREVER) -> Certificate:
    """Return a new P-256 key pair with a self-signed certificate. `validity`: its first and last time."""
    # Takes a while to import, and most jobs have no connection between hosts.
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return _make_signed(name, key, name, key, validity)


def parse_certificate(text: str) -> Certificate:
    """Return what `pem` and `key_pem` of a certificate say, one after the other. Raises ValueError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    begin = text.find("-----BEGIN", 1)
    pem, key_pem = text[:begin], text[begin:]
    found = x509.load_pem_x509_certificate(pem.encode())
    key = serialization.load_pem_private_key(key_pem.encode(), None)
    if begin < 0 or key.public_key() != found.public_key():
        raise ValueError("a certificate and its key belong together")
    return Certificate(found.public_bytes(serialization.Encoding.DER), pem, key_pem)


def make_credentials(seed: bytes, addresses: Sequence[str] = ()) -> Credentials:
    """Return the authority whose key follows from `seed`, and a new certificate that it has signed.

    Who has the seed can make both. It can't be found out from the certificates. `addresses`: the numeric
    ones that the certificate is for, which programs other than insitu compare.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    number = int.from_bytes(hashlib.sha512(b"insitu authority 1" + seed).digest(), "big")
    authority = ec.derive_private_key(number % (_ORDER - 1) + 1, ec.SECP256R1())
    name = "insitu cluster"
    signed = _make_signed(name, authority, name, authority, FOREVER, is_authority=True)
    key = ec.generate_private_key(ec.SECP256R1())
    own = _make_signed("insitu member", key, name, authority, FOREVER, addresses=addresses)
    return Credentials(signed.pem, own)


def _make_signed(
    name: str,
    key: Any,
    issuer: str,
    signer: Any,
    validity: tuple[datetime, datetime],
    *,
    is_authority: bool = False,
    addresses: Sequence[str] = (),
) -> Certificate:
    """Return the certificate of `key` that `signer` has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
    )
    if is_authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    if addresses:
        names = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = builder.sign(signer, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    pem = made.public_bytes(serialization.Encoding.PEM).decode()
    return Certificate(made.public_bytes(serialization.Encoding.DER), pem, private.decode())
