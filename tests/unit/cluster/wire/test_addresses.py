"""The address that others reach this machine by."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from insitu.base.errors import InputError
from insitu.base.net.ports import format_address
from insitu.cluster.wire import addresses


def test_addresses_of_both_families_are_written() -> None:
    assert format_address("10.0.0.1", 7) == "10.0.0.1:7"
    assert format_address("fd00::1", 7) == "[fd00::1]:7"
    assert addresses.family_of("fd00::1") is socket.AF_INET6


def test_the_route_decides() -> None:
    assert addresses.find_route_source("127.0.0.1") == "127.0.0.1"
    assert addresses.choose_head_address(["localhost", "127.0.0.1"]) in ("127.0.0.1", "::1")


def routes(monkeypatch: pytest.MonkeyPatch, table: dict[str, str]) -> None:
    def find(host: str) -> str:
        if host not in table:
            raise OSError(-2, "Name or service not known")
        return table[host]

    monkeypatch.setattr(addresses, "find_route_source", find)


def test_the_head_has_the_address_that_routes_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    routes(monkeypatch, {"a": "10.0.0.1", "b": "10.0.0.1", "localhost": "127.0.0.1"})
    assert addresses.choose_head_address(["a", "b"]) == "10.0.0.1"
    # Others can't reach the loopback interface, but this host can reach itself by the other one.
    assert addresses.choose_head_address(["a", "localhost"]) == "10.0.0.1"
    assert addresses.choose_head_address(["localhost"]) == "127.0.0.1"
    assert addresses.choose_head_address(["alias-of-ssh", "a"]) == "10.0.0.1"


def test_several_addresses_or_none_are_for_the_user_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    routes(monkeypatch, {"a": "10.0.0.1", "b": "192.168.0.1"})
    with pytest.raises(
        InputError, match=r"10\.0\.0\.1 on the way to a, 192\.168\.0\.1 on the way to b.*--interface"
    ):
        addresses.choose_head_address(["a", "b"])
    with pytest.raises(InputError, match=r"no route to x \(Name or service not known\)"):
        addresses.choose_head_address(["x"])


def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, text: str) -> object:
        return SimpleNamespace(family=family, address=text)

    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            "lo": [address(socket.AF_INET, "127.0.0.1")],
            "eth0": [
                address(socket.AF_PACKET, "00:11:22:33:44:55"),
                address(socket.AF_INET6, "fe80::1%eth0"),
                address(socket.AF_INET6, "fd00::7"),
                address(socket.AF_INET, "10.0.0.7"),
            ],
        },
    )


def test_an_interface_is_named_by_itself_or_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch)
    assert addresses.resolve_interface("eth0", socket.AF_INET) == "10.0.0.7"
    assert addresses.resolve_interface("eth0", socket.AF_INET6) == "fd00::7"
    assert addresses.resolve_interface("10.0.0.7") == "10.0.0.7"
    assert addresses.resolve_interface("fd00:0::7") == "fd00::7"


@pytest.mark.parametrize("text", ["eth9", "10.0.0.8", "fe80::1", ""])
def test_what_this_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    interfaces(monkeypatch)
    with pytest.raises(InputError, match=r"There are: lo \(127\.0\.0\.1\), eth0 \(fd00::7, 10\.0\.0\.7\)"):
        addresses.resolve_interface(text)
