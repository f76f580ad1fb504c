"""Imports from servers of HTTP, as they differ, by the package of fsspec. Run by `make test-stores`."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import insitu
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from object_stores import Web, WebWithoutRanges

from insitu.base.paths import Paths
from insitu.grid import Catalog

pytest.importorskip("aiohttp")
ROWS = b"id,half\n" + b"".join(b"%d,%.1f\n" % (i, i / 2) for i in range(50_000))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[type[Web]], Web]]:
    with contextlib.ExitStack() as opened:

        def make(kind: type[Web]) -> Web:
            return opened.enter_context(contextlib.closing(kind(tmp_path)))

        yield make


def fail(home: Path, url: str) -> str:
    said = " ".join(insitu(home, "import", "x", url, code=2).stderr.split())
    assert "Traceback" not in said and Catalog(Paths(home)).find("x") is None
    return said


def test_a_server_that_gives_whole_files_alone_is_named(make: Callable[[type[Web]], Web], home: Path) -> None:
    store = make(WebWithoutRanges)
    store.put("data/0.csv", ROWS + b"".join(b"%d,0.5\n" % i for i in range(2_000_000)))
    said = fail(home, f"{store.prefix}data/*.csv")
    assert f"{store.prefix}data/0.csv can't be read: files are read in pieces" in said
    assert "import it from a disk" in said


def test_neither_a_signature_nor_a_password_is_shown(make: Callable[[type[Web]], Web], home: Path) -> None:
    store = make(Web)
    store.put("data/0.csv", ROWS)
    with_password = store.prefix.replace("http://", "http://me:PassWord@")
    for url in (f"{store.prefix}data/1.csv?sig=TheSignature", f"{with_password}data/1.csv"):
        said = fail(home, url)
        assert "data/1.csv doesn't exist" in said
        assert "TheSignature" not in said and "PassWord" not in said
    store.proxy.status = 503
    for url in (f"{store.prefix}data/0.csv?sig=TheSignature", f"{with_password}data/0.csv"):
        said = fail(home, url)
        assert "data/0.csv" in said and "TheSignature" not in said and "PassWord" not in said
    store.proxy.reset()
    insitu(home, "import", "x", f"{store.prefix}data/0.csv?sig=TheSignature")
    insitu(home, "import", "y", f"{with_password}data/0.csv")
    for path in home.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"TheSignature" not in data and b"PassWord" not in data, path


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write the certificate and the key of 127.0.0.1."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = builder.sign(key, hashes.SHA256())
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *encoding))
    return paths


def test_a_server_with_a_certificate_is_read_and_one_that_is_not_known_is_refused(
    make: Callable[[type[Web]], Web], home: Path, tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path)
    store = make(Web)
    store.put("data/0.csv", ROWS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    store.encrypt(context)
    url = f"{store.at.replace('http', 'https')}/data/0.csv"
    assert f"{url} can't be read" in fail(home, url)
    insitu(home, "import", "x", url, SSL_CERT_FILE=str(certificate))
    found = Catalog(Paths(home)).find("x")
    assert found is not None and sum(info.rows for info in found.partitions) == len(np.arange(50_000))
