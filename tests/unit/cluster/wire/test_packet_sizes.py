"""That large packets are lost is in tests/fault/test_hosts.py, where a network loses them."""

from __future__ import annotations

import socket

import pytest

from insitu.cluster.wire import reachability
from insitu.cluster.wire.reachability import PROBE_BYTES, find_lost_packets


def test_what_a_system_acknowledges_arrives_also_where_nobody_reads_it() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
    ):
        assert find_lost_packets(caller, bytes(PROBE_BYTES), 60.0) == ""


def test_what_is_never_acknowledged_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "has_acknowledged_all", lambda connection: False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
    ):
        said = find_lost_packets(caller, bytes(PROBE_BYTES), 0.0)
        size = caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        assert f"those of {size} bytes don't" in said
