"""Whether another host can be reached. Two witnesses of this machine look for each other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from insitu.base.net.ports import format_address
from insitu.cluster.job_hosts import host_server
from insitu.cluster.job_hosts.host_server import HostWitness


def wait_for_news(witness: HostWitness) -> list[str]:
    deadline = time.monotonic() + 60
    while not (seen := witness.take_seen()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return seen


def test_hosts_see_each_other_and_one_whose_server_has_ended() -> None:
    with contextlib.closing(HostWitness("127.0.0.1")) as here:
        there = HostWitness("127.0.0.1")
        here.look("b", there.address)
        assert wait_for_news(here) == ["b"]
        assert here.take_seen() == there.take_seen() == []
        there.close()
        here.look("b", there.address)  # its system refuses, so it is there
        assert wait_for_news(here) == ["b"]


def test_one_that_says_nothing_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    tried = threading.Event()

    def connect(host: str, port: int, seconds: float) -> socket.socket:
        asked.append((host, port))
        assert tried.wait(60)
        raise TimeoutError

    monkeypatch.setattr(host_server, "connect_within", connect)
    with contextlib.closing(HostWitness("127.0.0.1")) as here:
        address = format_address("10.1.2.3", 20_000)
        here.look("b", address)
        here.look("b", address)  # it is being tried
        tried.set()
        deadline = time.monotonic() + 60
        while len(asked) < 2:  # the first try is over once another one begins
            assert time.monotonic() < deadline and here.take_seen() == []
            here.look("b", address)
            time.sleep(0.01)
    assert set(asked) == {("10.1.2.3", 20_000)}


def test_callers_at_the_door_are_let_go() -> None:
    with contextlib.closing(HostWitness("127.0.0.1")) as here:
        host, _, port = here.address.rpartition(":")
        with socket.create_connection((host, int(port)), 20) as caller:
            assert here.take_seen() == []
            assert caller.recv(1) == b""
