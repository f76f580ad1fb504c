"""Ports held for tasks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.net import ports
from insitu.base.net.ports import candidate_ports, hold_port, list_host_addresses
from tests.support.foreign_user import needs_root, run_as


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


@pytest.fixture(autouse=True)
def nothing_handed_down(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ports, "_inherited", {})
    monkeypatch.setenv(ports.LISTENER_ENV, "")
    yield
    for kept in ports._inherited.values():
        kept.close()


def hand_down(monkeypatch: pytest.MonkeyPatch) -> int:
    """Hand a bound socket to this process. Returns its port."""
    held = hold_port("127.0.0.1")
    monkeypatch.setenv(ports.LISTENER_ENV, ports.describe_listener(held))
    port = int(held.getsockname()[1])
    held.detach()
    return port


def test_a_bound_socket_is_handed_down_and_stays_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being chosen and being bound, anybody could take a task's port."""
    port = hand_down(monkeypatch)
    for _ in range(3):  # as each generation of a group does
        listener = ports.take_inherited("127.0.0.1", port)
        assert listener is not None and not listener.get_inheritable()
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # first, so that the connection lingers at this port
        ports.stop_listening(listener)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.setsockopt(socket.SOL_SOCKET, option, 1)
                stranger.bind(("127.0.0.1", port))
    assert ports.take_inherited("127.0.0.1", port + 1) is None


def test_a_port_of_the_system_is_kept_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux frees the port of a socket that was bound to 0 once it stops listening."""
    everything = tmp_path / "range"
    everything.write_text("1 65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", everything)
    with hold_port("127.0.0.1") as held:
        held.listen()
        held.shutdown(socket.SHUT_RDWR)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(held.getsockname())


@needs_root
def test_only_this_user_can_listen_beside_a_held_port() -> None:
    def bind() -> str:
        with socket.socket() as beside:
            beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            beside.bind(address)
        return "bound"

    with hold_port("127.0.0.1") as held:
        address = held.getsockname()
        assert bind() == "bound" and "in use" in run_as(bind)


def test_a_process_that_did_not_get_the_socket_listens_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a task's script starts, and which trains in the task's place."""
    with hold_port("127.0.0.1") as held:
        host, port = held.getsockname()
        monkeypatch.setenv(ports.LISTENER_ENV, f":{host}:{port}")
        listener = ports.take_inherited(host, port)
        assert listener is not None
        with listener:
            listener.listen()
            socket.create_connection((host, port)).close()
        assert ports.take_inherited(host, port + 1) is None


def test_only_one_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    port = hand_down(monkeypatch)
    listener = ports.take_inherited("127.0.0.1", port)
    assert listener is not None
    with listener, monkeypatch.context() as patch, pytest.raises(OSError, match="in use"):
        # What a process finds that this one has started.
        patch.setattr(ports, "_inherited", {})
        assert os.environ[ports.LISTENER_ENV] == f":127.0.0.1:{port}"
        ports.take_inherited("127.0.0.1", port)


def test_what_is_no_bound_socket_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (
        open(tmp_path / "file", "wb") as file,
        socket.socket(socket.AF_UNIX) as other,
        hold_port("127.0.0.1") as somebodys,
    ):
        for descriptor in (file.fileno(), other.fileno(), somebodys.fileno(), 9999):
            monkeypatch.setenv(ports.LISTENER_ENV, f"{descriptor}:127.0.0.1:1")
            assert ports.take_inherited("127.0.0.1", 2) is None
        file.write(b"still open")
        assert somebodys.getsockname()[1] > 0 and not ports._inherited


def test_a_host_has_addresses_that_others_may_know() -> None:
    found = list_host_addresses()
    assert socket.gethostname() in found and found == sorted(set(found))
    assert (
        not [each for each in found if each.startswith(("127.", "fe80", "169.254."))] and "::1" not in found
    )
