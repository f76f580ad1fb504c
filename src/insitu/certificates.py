"""Makes a key pair and a self-signed certificate for TLS. Nothing here opens a socket or a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

FOREVER = (datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
"""A validity without limits: peers recognize the certificate itself, and clocks of hosts may differ."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key."""

    #: The certificate as DER.
    der: bytes
    #: The certificate as PEM.
    pem: str
    #: The private key as PEM.
    key_pem: str = field(repr=False)


def make_certificate(name: str = "insitu", validity: tuple[datetime, datetime] = FOREVER) -> Certificate:
    """Return a new P-256 key pair with a self-signed certificate. `validity`: its first and last time."""
    # Takes a while to import, and most jobs have no connection between hosts.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    pem = made.public_bytes(serialization.Encoding.PEM).decode()
    return Certificate(made.public_bytes(serialization.Encoding.DER), pem, private.decode())
