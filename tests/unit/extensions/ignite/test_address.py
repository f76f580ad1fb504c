"""Addresses of caches of Ignite, and settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import InputError, SourceError
from insitu.base.net.certificates import make_certificate
from insitu.extensions.ignite.address import Address, parse_address, read_settings


@pytest.mark.parametrize(
    ("text", "servers", "cache"),
    [
        ("ignite://a/C", (("a", 10800),), "C"),
        ("ignite://a:1,b,10.0.0.1:65535/dir/C", (("a", 1), ("b", 10800), ("10.0.0.1", 65535)), "dir/C"),
        ("ignite://[::1]:2/my%20cache", (("::1", 2),), "my cache"),
    ],
)
def test_addresses_name_servers_and_a_cache(text: str, servers: object, cache: str):
    found = parse_address(text)
    assert (found.servers, found.cache) == (servers, cache)


@pytest.mark.parametrize(
    "text", ["ignite://a", "ignite://a/", "ignite:///C", "ignite://a:0/C", "ignite://a:x/C"]
)
def test_other_addresses_are_refused(text: str):
    with pytest.raises(InputError, match="An address has the form"):
        parse_address(text)


def test_a_password_in_an_address_is_refused_and_not_shown():
    with pytest.raises(InputError, match="INSITU_IGNITE_PASSWORD") as caught:
        parse_address("ignite://joe:pa$$word@host:1/C")
    assert "pa$$word" not in str(caught.value) and "joe" not in str(caught.value)


def test_credentials_come_from_the_environment(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("ann\nsecret word\n")
    file.chmod(0o600)
    for environment, expected in [
        ({}, ("", "")),
        ({"INSITU_IGNITE_USERNAME": "a", "INSITU_IGNITE_PASSWORD": "b"}, ("a", "b")),
        ({"IGNITE_DATASET_USERNAME": "c", "IGNITE_DATASET_PASSWORD": "d"}, ("c", "d")),
        ({"INSITU_IGNITE_CREDENTIALS": str(file)}, ("ann", "secret word")),
    ]:
        found = read_settings(environment)
        assert (found.user, found.password) == expected
        assert not found.password or found.password not in repr(found)


def test_credentials_that_others_may_read_are_refused(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("ann\nword\n")
    file.chmod(0o644)
    with pytest.raises(InputError, match=r"its owner's alone. Received: .* of mode 644.*chmod 600"):
        read_settings({"INSITU_IGNITE_CREDENTIALS": str(file)})
    file.chmod(0o600)
    file.write_text("ann")
    with pytest.raises(InputError, match="1 line"):
        read_settings({"INSITU_IGNITE_CREDENTIALS": str(file)})
    with pytest.raises(InputError, match="can't be read"):
        read_settings({"INSITU_IGNITE_CREDENTIALS": str(tmp_path / "none")})


@pytest.mark.parametrize(
    "environment",
    [
        {"INSITU_IGNITE_PASSWORD": "x"},
        {"INSITU_IGNITE_TIMEOUT": "soon"},
        {"INSITU_IGNITE_TIMEOUT": "0"},
        {"INSITU_IGNITE_TLS": "yes"},
    ],
)
def test_settings_in_another_form_are_refused(environment: dict[str, str]):
    with pytest.raises(InputError):
        read_settings(environment)


def test_tls_is_asked_for_by_any_of_its_settings(tmp_path: Path):
    made = make_certificate()
    both = tmp_path / "both.pem"
    both.write_text(made.pem + made.key_pem)
    assert read_settings({}).tls is None
    assert read_settings({"INSITU_IGNITE_TLS": "1"}).tls is not None
    assert read_settings({"INSITU_IGNITE_CA": str(both)}).tls is not None
    assert read_settings({"INSITU_IGNITE_CA": str(both), "INSITU_IGNITE_CERT": str(both)}).tls is not None
    assert (
        read_settings({"IGNITE_DATASET_CERTFILE": str(both), "IGNITE_DATASET_KEYFILE": str(both)}).tls
        is not None
    )
    assert read_settings({"INSITU_IGNITE_CA": str(both), "INSITU_IGNITE_TLS": "0"}).tls is None
    with pytest.raises(SourceError, match="must be PEM files"):
        read_settings({"INSITU_IGNITE_CA": str(tmp_path / "none.pem")})


@pytest.mark.parametrize("cache", ["a/b", "100%", "a%20b", "x y#z", "\u6f22"])
def test_an_address_names_the_same_cache_again(cache: str):
    address = Address((("grid-1", 10800),), cache)
    assert parse_address(str(address)) == address
