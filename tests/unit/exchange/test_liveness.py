"""How long a host may be silent. Hosts that are cut off are in tests/fault/test_exchange_network.py."""

from __future__ import annotations

import socket
import time

import pytest

from insitu.base.errors import InputError
from insitu.exchange.peer_connections import (
    HOST_TIMEOUT_ENV,
    Silence,
    has_acknowledged_all,
    is_unreachable,
    measure_silence,
    read_host_timeout,
)


def test_the_limit_is_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_TIMEOUT_ENV, raising=False)
    assert read_host_timeout() == 5.0 and read_host_timeout(1.5) == 1.5
    monkeypatch.setenv(HOST_TIMEOUT_ENV, "20")
    assert read_host_timeout() == read_host_timeout(1.5) == 20.0
    for bad in ("0", "x", "nan", "inf", "-3"):
        monkeypatch.setenv(HOST_TIMEOUT_ENV, bad)
        with pytest.raises(InputError, match="must be seconds in"):
            read_host_timeout()


def test_a_host_that_acknowledges_is_reachable() -> None:
    """Also with a process that reads nothing, so that the connection is full."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
        with caller, called:
            caller.setblocking(False)
            assert has_acknowledged_all(caller) and not is_unreachable(caller, 0.0)
            with pytest.raises(BlockingIOError):
                while True:
                    caller.send(bytes(1 << 20))
            assert not has_acknowledged_all(caller) and not is_unreachable(caller, 60_000.0)
    assert not has_acknowledged_all(caller) and not is_unreachable(caller, 0.0)


def test_of_other_sockets_nothing_is_known() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert not is_unreachable(here, -1.0)


def test_a_silence_counts_beyond_its_limit_and_beyond_some_round_trips() -> None:
    assert Silence(2.0).exceeds(1.5) and not Silence(2.0).exceeds(3.0)
    assert not Silence(2.0, round_trip=0.2).exceeds(1.5) and Silence(4.5, round_trip=0.2).exceeds(1.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
        with caller, called:
            caller.sendall(b"beat")
            assert called.recv(4) == b"beat"
            deadline = time.monotonic() + 30
            while not has_acknowledged_all(caller):
                assert time.monotonic() < deadline
            found = measure_silence(caller)
            assert found.seconds == 0.0 and 0.0 < found.round_trip < 1.0
    assert measure_silence(caller) == Silence()
