"""The congestion control of short and of long paths."""

from __future__ import annotations

import socket
import sys
from unittest import mock

import pytest

from insitu.exchange import tcp_tuning

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is chosen by Linux' socket options")


def _control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_reno_on_short_paths_and_the_system_default_on_long_ones() -> None:
    with socket.socket() as fresh:
        default = _control(fresh)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as caller:
        tcp_tuning.choose_before_connect(listener)
        tcp_tuning.choose_before_connect(caller)
        caller.connect(listener.getsockname())
        called, _ = listener.accept()
        with called:
            called.sendall(b"x")
            assert caller.recv(1) == b"x"
            caller.sendall(b"y")
            assert called.recv(1) == b"y"
            tcp_tuning.choose_after_connect(called)
            assert _control(called) == _control(caller) == b"reno"
            with mock.patch.object(tcp_tuning, "_LONG_ROUND_TRIP", 0):
                tcp_tuning.choose_after_connect(called)
            assert _control(called) == default


def test_unknown_congestion_control_changes_nothing() -> None:
    with socket.socket() as connection:
        before = _control(connection)
        tcp_tuning._set_congestion_control(connection, b"none such")
        assert _control(connection) == before
        tcp_tuning.choose_after_connect(connection)  # it isn't connected
        assert _control(connection) == before
