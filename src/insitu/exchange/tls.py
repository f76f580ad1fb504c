"""Decides which connections are encrypted, and holds the certificate and contexts of this process.

Each process makes a certificate of its own (`certificates.py`), and no authority signs it. It is recognized
by the job's secret: the proofs that the peers send each other inside of the connection are also over the
digest of the acceptor's certificate (`handshake.py`). Somebody between two peers shows another certificate,
so the proofs don't fit. Nothing needs to be distributed, no clock is looked at, and the certificate reveals
nothing to a stranger that helps to guess the secret.

A user who has certificates sets INSITU_TLS_CERT, INSITU_TLS_KEY and INSITU_TLS_CA. Then both sides must
also show one that the authority has signed and that is valid now.
"""

from __future__ import annotations

import functools
import hashlib
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from insitu.base.errors import InputError
from insitu.base.net.certificates import make_certificate
from insitu.base.net.unauthenticated import is_loopback

TLS_ENV = "INSITU_TLS"
"""`auto`: encrypt what leaves this host; `always`; `never`: also between hosts plain text, with a warning."""
TLS_CERT_ENV = "INSITU_TLS_CERT"
"""A PEM file with the certificate of this process, and those that lead to the authority."""
TLS_KEY_ENV = "INSITU_TLS_KEY"
"""A PEM file with its private key; not needed if INSITU_TLS_CERT has it, too."""
TLS_CA_ENV = "INSITU_TLS_CA"
"""A PEM file with the certificates of the authorities that the peers' certificates must come from."""

TlsMode = Literal["auto", "always", "never"]
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Settings of the user; the same for all tasks of a job."""

    #: When connections are encrypted.
    mode: TlsMode = "auto"
    #: Path of the user's own certificate; empty: one is made.
    certificate: str = ""
    #: Path of its private key; empty: it is in the same file.
    key: str = ""
    #: Path of the authorities that peers' certificates must come from.
    ca: str = ""

    def must_encrypt(self, host: str) -> bool:
        """Return True if a connection to the peer at the numeric address `host` must be encrypted."""
        return self.mode == "always" or (self.mode == "auto" and not is_loopback(host))


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The certificate of this process, ready for use."""

    #: For connections that were accepted.
    server: ssl.SSLContext
    #: For connections that were dialled.
    client: ssl.SSLContext
    #: The digest of the certificate; see `compute_binding`.
    binding: bytes


def read_tls_settings(environ: Mapping[str, str] = os.environ) -> TlsSettings:
    """Return the settings of this process. Raises InputError for values that can't be, and for files that
    can't be used."""
    mode = environ.get(TLS_ENV) or "auto"
    if mode not in get_args(TlsMode):
        raise InputError(f"{TLS_ENV} must be one of {', '.join(get_args(TlsMode))}. Received: {mode!r}")
    files = {name: environ.get(name) or "" for name in (TLS_CERT_ENV, TLS_KEY_ENV, TLS_CA_ENV)}
    certificate, key, ca = files.values()
    if bool(certificate) != bool(ca) or (key and not certificate):
        raise InputError(
            f"Certificates of your own need {TLS_CERT_ENV} and {TLS_CA_ENV}, and {TLS_KEY_ENV} unless the "
            "first file has the key, too. Received: only "
            f"{', '.join(name for name in files if files[name])}. Set all for each task, or none"
        )
    found = TlsSettings(mode, certificate, key, ca)  # type: ignore[arg-type]
    if certificate:
        load_identity(found)  # else only callers would notice
    return found


def load_identity(settings: TlsSettings) -> TlsIdentity:
    """Return the certificate of this process, made or read on the first call. Raises InputError."""
    if not settings.certificate:
        return _make_identity()
    return _read_identity(settings.certificate, settings.key, settings.ca)


def compute_binding(der: bytes) -> bytes:
    """Return what ties a proof of the secret to a connection whose acceptor has shown this certificate."""
    return b"tls 1.3 " + hashlib.sha256(der).digest()


@functools.cache
def _make_identity() -> TlsIdentity:
    made = make_certificate()
    server, client = _make_context(ssl.PROTOCOL_TLS_SERVER), _make_context(ssl.PROTOCOL_TLS_CLIENT)
    client.verify_mode = ssl.CERT_NONE  # the proof of the secret is over the certificate
    # `ssl` takes a key only from a file: this one is memory without a name, and never on a disk.
    file = os.memfd_create("insitu-tls", os.MFD_CLOEXEC)
    try:
        os.write(file, f"{made.pem}{made.key_pem}".encode())
        server.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return TlsIdentity(server, client, compute_binding(made.der))


@functools.cache
def _read_identity(certificate: str, key: str, ca: str) -> TlsIdentity:
    server, client = _make_context(ssl.PROTOCOL_TLS_SERVER), _make_context(ssl.PROTOCOL_TLS_CLIENT)
    path = certificate
    try:
        pem = Path(certificate).read_text()
        der = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(_END)] + _END)
        for context in (server, client):
            path = f"{certificate} with {key}" if key else certificate
            # The password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(certificate, key or None, password="")
            path = ca
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # also those of ssl
        raise InputError(
            f"{TLS_CERT_ENV}, {TLS_KEY_ENV} and {TLS_CA_ENV} must name PEM files of certificates and of the "
            f"first one's key, without a password. Received: {path} ({error}). Check the files"
        ) from error
    return TlsIdentity(server, client, compute_binding(der))


def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # addresses are numbers as often as names
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A ticket would arrive unasked, and a byte means here that the peer has ended.
        context.num_tickets = 0
    return context
