"""Certificates that insitu makes."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from insitu.exchange.certificates import _G, _N, _P, Certificate, _integer, _multiply, _oid, make_certificate

_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B


def test_multiples_of_the_generator_are_those_of_the_standard() -> None:
    assert _multiply(1, _G) == _G
    assert _multiply(2, _G)[0] == 0x7CF27B188D034F7E8A52380304B51AC3C08969E277F21B35A60B48FC47669978
    assert _multiply(_N - 1, _G) == (_G[0], _P - _G[1])
    with pytest.raises(ValueError, match="no coordinates"):
        _multiply(_N, _G)
    for factor in (3, 2**255, _N // 3):
        x, y = _multiply(factor, _G)
        assert (y * y - x**3 + 3 * x - _B) % _P == 0


def test_numbers_and_names_have_the_form_of_der() -> None:
    assert _integer(0) == b"\x02\x01\x00"
    assert _integer(127) == b"\x02\x01\x7f"
    assert _integer(128) == b"\x02\x02\x00\x80"
    assert _oid("1.2.840.10045.2.1").hex() == "06072a8648ce3d0201"


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
        _load(Certificate(first.der, second.key_pem), tmp_path, "mixed.pem")


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
