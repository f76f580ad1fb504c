"""Bound sockets of tasks: kept while the job lives, handed down, silent after the task's end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from ipv6 import needs_ipv6

from insitu.base.net import ports
from insitu.base.net.ports import LISTENER_ENV
from insitu.base.spec import TaskId
from insitu.cluster.engines.engine import Command
from insitu.cluster.engines.local import TaskListeners, with_listener
from insitu.exchange import parse_address

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


@pytest.fixture
def listeners() -> Iterator[TaskListeners]:
    made = TaskListeners("127.0.0.1")
    yield made
    made.close()


def is_bound(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as stranger:
        try:
            stranger.bind((host, int(port)))
        except OSError:
            return True
        return False


def test_a_task_gets_the_socket_of_its_address(listeners: TaskListeners) -> None:
    addresses = listeners.reserve([W0, W1], ())
    held = listeners.take(W0)
    assert held is not None and addresses[W0] == "{}:{}".format(*held.getsockname())
    command = with_listener(Command(("run",), {"A": "b"}), held)
    assert command.environment == {"A": "b", LISTENER_ENV: f"{held.fileno()}:{addresses[W0]}"}
    assert all(map(is_bound, addresses.values()))


@needs_ipv6
def test_an_address_of_ipv6_has_brackets_and_is_found_by_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TaskListeners("::1")
    try:
        address = made.reserve([W0], ())[W0]
        held = made.take(W0)
        assert held is not None and address == f"[::1]:{held.getsockname()[1]}"
        given = with_listener(Command(("run",), {}), held).environment[LISTENER_ENV]
        monkeypatch.setattr(ports, "_inherited", {})
        ports.adopt_listener(os.dup(held.fileno()), given.partition(":")[2])
        taken = ports.take_inherited(*parse_address(address))
        assert taken is not None and taken.getsockname() == held.getsockname()
        taken.close()
    finally:
        for kept in ports._inherited.values():
            kept.close()
        made.close()


def test_the_next_process_gets_the_same_socket_unless_another_was_reserved(listeners: TaskListeners) -> None:
    first = listeners.reserve([W0], ())[W0]
    held = listeners.take(W0)
    listeners.stop_listening(W0)
    assert listeners.take(W0) is held
    second = listeners.reserve([W0], ())[W0]
    assert listeners.take(W0) is not held and not is_bound(first) and is_bound(second)


def test_what_was_not_used_is_let_go_of(listeners: TaskListeners) -> None:
    address = listeners.reserve([W0], ())[W0]
    listeners.reserve([], ())
    assert not is_bound(address) and listeners.take(W0) is None


def test_an_address_of_a_process_without_a_socket_is_free(listeners: TaskListeners) -> None:
    """It opens the port itself."""
    assert not is_bound(listeners.reserve([W0], [W0])[W0])


def test_nobody_answers_for_a_task_that_has_ended(listeners: TaskListeners) -> None:
    listeners.reserve([W0], ())
    held = listeners.take(W0)
    assert held is not None
    held.listen()
    listeners.stop_listening(W0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())
    assert is_bound("{}:{}".format(*held.getsockname()))


def test_a_socket_of_another_process_is_not_named() -> None:
    """The supervisor may itself be started by a task."""
    command = Command(("run",), {"A": "b", LISTENER_ENV: "7:127.0.0.1:20000"})
    assert with_listener(command, None).environment == {"A": "b"}
