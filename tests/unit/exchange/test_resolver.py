"""Looking up hosts without waiting."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from insitu.exchange import resolver
from insitu.exchange.resolver import Resolver


def _wait(found: Any, limit: float = 30.0) -> Any:
    until = time.monotonic() + limit
    while not (result := found()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return result


def test_numbers_are_known_at_once() -> None:
    (found,) = Resolver().find("127.0.0.1", 5)
    assert (found.family, found.address, found.is_loopback) == (socket.AF_INET, ("127.0.0.1", 5), True)
    assert [each.family for each in Resolver().find("::1", 5)] == [socket.AF_INET6]


def test_a_slow_name_server_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held up the whole rendezvous, in each turn of its loop."""
    answer, real = threading.Event(), socket.getaddrinfo

    def look_up(host: str, port: int, **options: Any) -> Any:
        if options.get("flags"):
            return real(host, port, **options)
        assert answer.wait(30)
        return real("192.0.2.7", port, **options) + real("127.0.0.1", port, **options)

    monkeypatch.setattr(resolver.socket, "getaddrinfo", look_up)
    found = Resolver()
    assert found.find("name.example", 5) == [] == found.find("name.example", 5)
    answer.set()
    addresses = _wait(lambda: found.find("name.example", 5))
    assert [each.address[0] for each in addresses] == ["192.0.2.7", "127.0.0.1"]
    assert [each.is_loopback for each in addresses] == [False, True]


def test_a_name_that_is_not_known_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_RETRY_INTERVAL", 0.0)
    real, calls = socket.getaddrinfo, []

    def look_up(host: str, port: int, **options: Any) -> Any:
        if not options.get("flags"):
            calls.append(host)
            if len(calls) > 2:
                return real("192.0.2.7", port, **options)
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(resolver.socket, "getaddrinfo", look_up)
    found = Resolver()
    assert _wait(lambda: found.find("name.example", 5) or (len(calls) < 3 and None))
    assert found.get_failure("name.example") == "not known" and found.get_failure("other") == ""


def test_waiting_for_a_name_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own way to connect waits for the name server as long as that likes."""
    answer, real, calls = threading.Event(), socket.getaddrinfo, []

    def look_up(host: str, port: int, **options: Any) -> Any:
        if options.get("flags"):
            return real(host, port, **options)
        calls.append(host)
        assert answer.wait(30)
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(resolver.socket, "getaddrinfo", look_up)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"name\.example"):
                resolver.connect_within("name.example", port, 0.01)
        assert calls == ["name.example"], "one thread, however often it is asked"
        answer.set()
        _wait(lambda: not resolver._look_ups)
        with resolver.connect_within("name.example", port, 30) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        resolver.connect_within("127.0.0.1", port, 30)


def test_a_name_that_cannot_be_one_is_an_error() -> None:
    with pytest.raises(OSError, match=r"."):
        resolver.resolve("x" * 70 + ".example", 5, 30)
