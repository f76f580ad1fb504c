"""Ports held for tasks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from insitu import ports
from insitu.errors import ClusterError
from insitu.ports import candidate_ports, hold_port
from insitu.spec import TaskId

W0 = TaskId("worker", 0)


def test_ports_lie_outside_the_range_that_the_system_gives_away() -> None:
    assert candidate_ports((32768, 60999)) == range(15000, 32768)
    assert candidate_ports((1024, 20000)) == range(20001, 65000)
    assert len(candidate_ports((1, 65535))) == 0


def test_held_ports_are_distinct_and_nobody_else_gets_them() -> None:
    held = [hold_port("127.0.0.1") for _ in range(20)]
    try:
        numbers = {h.getsockname()[1] for h in held}
        assert len(numbers) == 20
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", numbers.pop()))
    finally:
        for one in held:
            one.close()


def test_without_room_beside_the_ephemeral_range_the_system_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything = tmp_path / "range"
    everything.write_text("1 65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", everything)
    with hold_port("127.0.0.1") as held:
        assert held.getsockname()[1] > 0


def test_an_address_that_is_not_this_machines_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1"):
        hold_port("192.0.2.1")


def test_a_bound_socket_is_handed_down_and_stays_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being chosen and being bound, anybody could take a task's port."""
    monkeypatch.setattr(ports, "_inherited", {})
    held = hold_port("127.0.0.1")
    port = held.getsockname()[1]
    descriptor = held.detach()
    monkeypatch.setenv(ports.LISTENER_ENV, str(descriptor))
    for _ in range(3):  # as each generation of a group does
        listener = ports.take_inherited("127.0.0.1", port)
        assert listener is not None and ports.LISTENER_ENV not in os.environ
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            stranger.bind(("127.0.0.1", port))
    assert ports.take_inherited("127.0.0.1", port + 1) is None
    for kept in ports._inherited.values():
        kept.close()


def test_what_is_no_bound_socket_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "_inherited", {})
    with open(tmp_path / "file", "wb") as file, socket.socket(socket.AF_UNIX) as other:
        for descriptor in (file.fileno(), other.fileno(), 9999):
            monkeypatch.setenv(ports.LISTENER_ENV, str(descriptor))
            assert ports.take_inherited("127.0.0.1", 1) is None
        file.write(b"still open")
