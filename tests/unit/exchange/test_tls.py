"""Which connections are encrypted, and with which certificate."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tls_peers import write_certificate

from insitu.base.errors import InputError
from insitu.exchange.tls import TlsSettings, compute_binding, load_identity, read_tls_settings
from tests.support.descriptors import find_new_descriptors, list_descriptors

LOOPBACK = ["127.0.0.1", "127.255.1.2", "::1", "::ffff:127.0.0.1"]
OTHERS = ["10.0.0.1", "0.0.0.0", "192.168.1.1", "::", "fe80::1%eth0", "2001:db8::1", "::ffff:10.0.0.1", "a.b"]


@pytest.mark.parametrize("host", LOOPBACK + OTHERS)
def test_all_that_leaves_the_host_is_encrypted_unless_the_user_says_otherwise(host: str) -> None:
    assert TlsSettings().must_encrypt(host) == (host in OTHERS)
    assert TlsSettings("always").must_encrypt(host)
    assert not TlsSettings("never").must_encrypt(host)


@given(st.ip_addresses(v=4))
def test_addresses_of_ipv4_are_loopback_by_their_first_number(address: object) -> None:
    assert TlsSettings().must_encrypt(str(address)) != str(address).startswith("127.")


def test_settings_are_read(tmp_path: Path) -> None:
    assert read_tls_settings({}) == read_tls_settings({"INSITU_TLS": ""}) == TlsSettings("auto")
    assert read_tls_settings({"INSITU_TLS": "always"}).mode == "always"
    own = str(write_certificate(tmp_path / "own.pem"))
    files = {"INSITU_TLS_CERT": own, "INSITU_TLS_KEY": own, "INSITU_TLS_CA": own}
    assert read_tls_settings(files) == TlsSettings("auto", own, own, own)
    with pytest.raises(InputError, match=r"must name PEM files.*no\.pem"):
        read_tls_settings({**files, "INSITU_TLS_CA": str(tmp_path / "no.pem")})
    with pytest.raises(InputError, match=r"INSITU_TLS must be one of auto, always, never.*Received: 'on'"):
        read_tls_settings({"INSITU_TLS": "on"})


@pytest.mark.parametrize("names", [["CERT"], ["CA"], ["KEY"], ["KEY", "CA"], ["CERT", "KEY"]])
def test_files_of_the_user_come_together(names: list[str]) -> None:
    with pytest.raises(InputError, match=f"Received: only INSITU_TLS_{names[0]}"):
        read_tls_settings({f"INSITU_TLS_{name}": "x" for name in names})


def test_a_process_has_one_certificate_and_another_one_has_its_own() -> None:
    first = load_identity(TlsSettings())
    assert load_identity(TlsSettings("always")) is first
    assert first.server.minimum_version == first.client.minimum_version == ssl.TLSVersion.TLSv1_3
    code = (
        "from insitu.exchange.tls import TlsSettings, load_identity; "
        "print(load_identity(TlsSettings()).binding.hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() not in ("", first.binding.hex())


def test_making_a_certificate_leaves_no_file_open() -> None:
    load_identity.__globals__["_make_identity"].cache_clear()
    before = list_descriptors()
    load_identity(TlsSettings())
    assert find_new_descriptors(before, "/") == []


def test_a_certificate_of_the_user_is_required_of_both_sides(tmp_path: Path) -> None:
    file = write_certificate(tmp_path / "own.pem")
    found = load_identity(TlsSettings("auto", str(file), "", str(file)))
    assert found.server.verify_mode == found.client.verify_mode == ssl.CERT_REQUIRED
    pem = file.read_text()
    pem = pem[: pem.index("-----BEGIN EC")]
    assert found.binding == compute_binding(ssl.PEM_cert_to_DER_cert(pem))


@pytest.mark.parametrize("broken", ["missing", "not pem", "no key", "other key", "locked key", "empty ca"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, broken: str) -> None:
    certificate, ca = write_certificate(tmp_path / "own.pem"), write_certificate(tmp_path / "ca.pem")
    key = ""
    if broken == "missing":
        certificate.unlink()
    elif broken == "not pem":
        certificate.write_text("hello")
    elif broken == "no key":
        certificate.write_text(certificate.read_text().partition("-----BEGIN EC")[0])
    elif broken == "other key":
        key = str(write_certificate(tmp_path / "key.pem"))
    elif broken == "locked key":
        text = certificate.read_text()
        head = "-----BEGIN EC PRIVATE KEY-----\n"
        lock = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\n"
        certificate.write_text(text.replace(head, head + lock))
    else:
        ca.write_text("")
    named = "ca.pem" if broken == "empty ca" else "own.pem"
    with pytest.raises(InputError, match=rf"must name PEM files.*Received: .*{named}"):
        load_identity(TlsSettings("auto", str(certificate), key, str(ca)))
