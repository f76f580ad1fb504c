"""Ports held for tasks."""

from __future__ import annotations

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
