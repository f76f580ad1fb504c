from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.base.net.certificates import make_certificate
from insitu.metadata.etcd_address import parse_etcd_url


def test_a_url_names_endpoints_user_and_files(tmp_path: Path):
    (tmp_path / "password").write_text("sesame\n")
    (tmp_path / "password").chmod(0o600)
    (tmp_path / "ca").write_text(make_certificate().pem)
    address = parse_etcd_url(
        f"etcd://me%40home@h1:2379,[::1]:2380?password={tmp_path}/password&ca={tmp_path}/ca"
    )
    assert address.endpoints == (("h1", 2379), ("::1", 2380))
    assert (address.user, address.password) == ("me@home", "sesame")
    assert address.tls is not None
    assert "sesame" not in repr(address)


def test_without_options_nothing_is_encrypted():
    address = parse_etcd_url("etcd://h1:2379")
    assert (address.user, address.tls) == ("", None)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("etcd://me:sesame@h1:2379", "no password"),
        ("etcd://me@h1:2379", "belong together"),
        ("etcd://h1:2379?password=/none", "belong together"),
        ("etcd://me@h1:2379?password=/none", "must be in a file"),
        ("etcd://h1:2379?cacert=/none", "etcd is named as"),
        ("etcd://h1:2379/path", "etcd is named as"),
        ("etcd://", "etcd is named as"),
        ("etcd://h1", "host:port"),
        ("etcd:me:sesame@h1:2379", "etcd is named as"),
        ("etcd://[h1:2379", "host:port"),
        ("etcd://h1:2379?ca=/none", "PEM files"),
        ("etcd://h1:2379?certificate=/none", "authority"),
    ],
)
def test_other_urls_are_refused(url: str, said: str):
    with pytest.raises(InputError, match=said) as refused:
        parse_etcd_url(url)
    assert "sesame" not in str(refused.value)


def test_a_password_that_others_may_read_is_refused(tmp_path: Path):
    (tmp_path / "password").write_text("sesame")
    (tmp_path / "password").chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        parse_etcd_url(f"etcd://me@h1:2379?password={tmp_path}/password")
