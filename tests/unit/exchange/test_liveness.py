"""How long a host may be silent. Hosts that are cut off are in tests/fault/test_exchange_network.py."""

from __future__ import annotations

import socket

import pytest

from insitu.errors import InputError
from insitu.exchange.liveness import HOST_TIMEOUT_ENV, has_acknowledged_all, is_unreachable, read_host_timeout


def test_the_limit_is_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_TIMEOUT_ENV, raising=False)
    assert read_host_timeout() == 5.0
    monkeypatch.setenv(HOST_TIMEOUT_ENV, "20")
    assert read_host_timeout() == 20.0
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
