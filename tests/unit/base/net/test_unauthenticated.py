"""What has no authentication stays on the loopback interface."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.base.net.unauthenticated import is_loopback, refuse_unauthenticated


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", True),
        ("127.1.2.3", True),
        ("[::1]:80", True),
        ("::1", True),
        ("localhost:80", True),
        ("127.255.0.9", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("127.0.0.1.evil.example:80", False),
        ("10.0.0.1:80", False),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("[fe80::1]:80", False),
        ("node-7:80", False),
        ("localhost.evil.example:80", False),
        ("", False),
    ],
)
def test_addresses_of_the_loopback_interface_are_known(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_other_addresses_need_the_users_word() -> None:
    addresses = ["127.0.0.1:1", "10.0.0.2:2"]
    message = r"X has no authentication.*Received: 10\.0\.0\.2:2, outside.*Use Y, or.*--allow-unauthenticated"
    for environ in ({}, {"INSITU_ALLOW_UNAUTHENTICATED": ""}, {"INSITU_ALLOW_UNAUTHENTICATED": "0"}):
        with pytest.raises(InputError, match=message):
            refuse_unauthenticated("X", "Use Y", addresses, environ)
    refuse_unauthenticated("X", "Use Y", addresses, {"INSITU_ALLOW_UNAUTHENTICATED": "1"})
    refuse_unauthenticated("X", "Use Y", addresses[:1], {})
