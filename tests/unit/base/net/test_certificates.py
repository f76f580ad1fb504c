"""Certificates that insitu makes."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature

from insitu.base.net.certificates import Certificate, make_certificate, make_credentials


def _load(made: Certificate, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(made.pem + made.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)  # OpenSSL refuses a key that isn't the certificate's
    return path


def test_openssl_takes_the_key_and_no_other_one(tmp_path: Path) -> None:
    first, second = make_certificate(), make_certificate()
    assert first.der != second.der and first.key_pem != second.key_pem
    _load(first, tmp_path, "first.pem")
    with pytest.raises(ssl.SSLError, match=r"(?i)key values mismatch"):
        _load(Certificate(first.der, first.pem, second.key_pem), tmp_path, "mixed.pem")


def test_openssl_reads_what_was_written(tmp_path: Path) -> None:
    path = _load(make_certificate("somebody"), tmp_path, "one.pem")
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.load_verify_locations(path)
    details = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    assert details["subject"] == details["issuer"] == ((("commonName", "somebody"),),)
    assert (details["notBefore"], details["notAfter"]) == (
        "Jan  1 00:00:00 2000 GMT",
        "Dec 31 23:59:59 9999 GMT",
    )


def test_the_key_is_not_shown() -> None:
    made = make_certificate()
    assert "PRIVATE" not in repr(made)


def _verify(authority: str, shown: Certificate) -> None:
    """Raise where the authority hasn't signed what a member shows."""
    from cryptography import x509

    issuer = x509.load_pem_x509_certificate(authority.encode())
    x509.load_pem_x509_certificate(shown.pem.encode()).verify_directly_issued_by(issuer)


def test_members_recognize_each_other_and_nobody_else(tmp_path: Path) -> None:
    first, second, other = make_credentials(b"seed"), make_credentials(b"seed"), make_credentials(b"other")
    assert first.own.key_pem != second.own.key_pem
    _load(first.own, tmp_path, "own.pem")
    _verify(first.authority, second.own)
    with pytest.raises(InvalidSignature):
        _verify(first.authority, other.own)
    assert "PRIVATE" not in repr(first)


def test_a_certificate_names_the_addresses_that_it_is_for(tmp_path: Path) -> None:
    made = make_credentials(b"seed", ("10.0.0.1", "fe80::1")).own
    details = ssl._ssl._test_decode_cert(str(_load(made, tmp_path, "one.pem")))  # type: ignore[attr-defined]
    names = dict.fromkeys(details["subjectAltName"])
    assert [kind for kind, _ in names] == ["IP Address"] * 2 and ("IP Address", "10.0.0.1") in names
