"""Requests off real sockets; what a controller makes of them is in `test_controller.py`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from readiness import wait_readable

from insitu.base.paths import JobPaths
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.control import request_inbox
from insitu.cluster.control.request_inbox import (
    MAX_CONNECTIONS,
    EarlyRequests,
    JobRequest,
    RequestInbox,
    send_signal,
)
from insitu.cluster.decide import new_job
from insitu.cluster.engines import SignalName
from insitu.cluster.engines.wakeup import Wakeup
from insitu.cluster.job_files import Journal
from insitu.cluster.job_files.request_socket import connect_for_requests, listen_for_requests
from tests.support.descriptors import find_new_descriptors, list_descriptors

PATIENCE = 60.0
STOP = {"id": "a1", "do": "stop"}


class Office:
    """An inbox and its clients."""

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self.wakeup = Wakeup(signal.SIGTERM)
        self.inbox = RequestInbox(listen_for_requests(job), self.wakeup)
        self._clients: list[socket.socket] = []

    def connect(self, sent: bytes | dict[str, object] = b"") -> socket.socket:
        client = connect_for_requests(self._job, PATIENCE)
        self._clients.append(client)
        client.settimeout(PATIENCE)
        client.sendall(sent if isinstance(sent, bytes) else json.dumps(sent).encode() + b"\n")
        return client

    def is_awake(self) -> bool:
        return bool(wait_readable([self.wakeup], 0))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.inbox.close()
        self.wakeup.close()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    before = signal.getsignal(signal.SIGTERM)
    made = Office(JobPaths(tmp_path))
    yield made
    made.close()
    signal.signal(signal.SIGTERM, before)


def read_all(client: socket.socket) -> bytes:
    """What comes until the other side closes."""
    data = b""
    while more := client.recv(1 << 16):
        data += more
    return data


def test_each_of_two_clients_gets_its_own_reply(office: Office) -> None:
    first, second = office.connect(STOP), office.connect({"id": "b2", "do": "scale", "workers": 3})
    assert office.is_awake()
    assert office.inbox.receive() == [JobRequest("stop", "a1"), JobRequest("scale", "b2", 3)]
    assert not office.is_awake() and office.inbox.receive() == []
    office.inbox.reply("b2", {"ok": True, "text": "scaled"})
    office.inbox.reply("a1", {"ok": True, "text": "stopped"})
    assert json.loads(read_all(first))["text"] == "stopped"
    assert json.loads(read_all(second))["text"] == "scaled"


def test_a_request_may_come_in_pieces(office: Office) -> None:
    client = office.connect(b'{"id": "a1", ')
    assert office.inbox.receive() == []
    client.sendall(b'"do": "stop"}\n')
    assert office.inbox.receive() == [JobRequest("stop", "a1")]


def test_a_client_that_says_nothing_blocks_nobody(office: Office) -> None:
    silent = [office.connect() for _ in range(3)]
    office.connect(STOP)
    assert office.inbox.receive() == [JobRequest("stop", "a1")]
    assert not office.is_awake()
    silent[0].sendall(b'{"id": "b2", "do": "stop"}\n')
    assert office.inbox.receive() == [JobRequest("stop", "b2")]


def test_of_too_many_silent_clients_the_oldest_is_closed(office: Office) -> None:
    # In two turns: as many as wait to be accepted at once are bounded too.
    silent = [office.connect() for _ in range(MAX_CONNECTIONS // 2)]
    assert office.inbox.receive() == []
    silent += [office.connect() for _ in range(MAX_CONNECTIONS // 2 + 1)]
    assert office.inbox.receive() == []
    assert read_all(silent[0]) == b""
    silent[1].sendall(json.dumps(STOP).encode() + b"\n")
    assert office.inbox.receive() == [JobRequest("stop", "a1")]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\xff\n", b"[]\n", b"1\n", b"\n", b"[" * 3000 + b"\n", b"x" * (1 << 16)],
)
def test_garbage_is_dropped(office: Office, garbage: bytes) -> None:
    client = office.connect(garbage)
    office.connect(STOP)
    assert office.inbox.receive() == [JobRequest("stop", "a1")]
    # A connection that is closed with bytes unread is reset.
    with contextlib.suppress(ConnectionResetError):
        assert read_all(client) == b""
    assert not office.is_awake()


@pytest.mark.parametrize(
    "message",
    [
        {"do": "stop"},
        {"id": 1, "do": "stop"},
        {"id": "", "do": "stop"},
        {"id": "a b", "do": "stop"},
        {"id": "a" * 65, "do": "stop"},
        {"id": "a1"},
        {"id": "a1", "do": "burn"},
        {"id": "a1", "do": ["stop"]},
        {"id": "a1", "do": "scale", "workers": "3"},
        {"id": "a1", "do": "scale", "workers": True},
        {"id": "a1", "do": "signal", "task": "worker:1", "name": "burn"},
        {"id": "a1", "do": "signal", "task": "worker:1", "name": ["kill"]},
        {"id": "a1", "do": "signal", "task": "nobody:1", "name": "kill"},
        {"id": "a1", "do": "signal", "name": "kill"},
    ],
)
def test_what_is_no_request_is_told_so(office: Office, message: dict[str, object]) -> None:
    client = office.connect(message)
    assert office.inbox.receive() == []
    assert json.loads(read_all(client))["error"] == "invalid"


def test_a_signal_goes_to_its_task_and_is_told(office: Office) -> None:
    client = office.connect({"id": "c3", "do": "signal", "task": "worker:1", "name": "suspend"})
    (request,) = office.inbox.receive()
    sent = []

    class Tasks:
        def signal(self, task: TaskId, name: SignalName) -> None:
            sent.append((task, name))

    send_signal(request, Tasks(), office.inbox)
    assert sent == [(TaskId("worker", 1), "suspend")]
    assert json.loads(read_all(client)) == {"ok": True, "text": "sent suspend to worker:1"}


def test_a_request_sent_again_is_replied_on_each_connection(office: Office) -> None:
    clients = [office.connect(STOP), office.connect(STOP)]
    assert office.inbox.receive() == [JobRequest("stop", "a1")] * 2
    office.inbox.reply("a1", {"ok": True})
    assert [json.loads(read_all(client)) for client in clients] == [{"ok": True}] * 2


def test_a_client_that_has_gone_does_not_matter(office: Office) -> None:
    office.connect().close()
    office.connect(STOP).close()
    assert office.inbox.receive() == [JobRequest("stop", "a1")]
    assert not office.is_awake()
    office.inbox.reply("a1", {"ok": True})


def test_strangers_are_turned_away(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_inbox, "is_from_owner", lambda connection: False)
    client = office.connect(STOP)
    assert office.inbox.receive() == []
    with pytest.raises(ConnectionResetError):
        read_all(client)


def test_a_signal_asks_for_a_stop(office: Office) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert office.is_awake()
    assert office.inbox.receive() == [JobRequest("stop")]


def test_clients_that_go_while_they_wait_hold_nothing(office: Office) -> None:
    office.inbox.receive()
    before = list_descriptors()
    for number in range(2 * MAX_CONNECTIONS):
        client = office.connect({"id": f"a{number}", "do": "stop"})
        assert len(office.inbox.receive()) == 1
        client.close()
    office.inbox.receive()
    assert find_new_descriptors(before, "socket:") == []


def test_of_too_many_waiting_clients_the_oldest_is_closed(office: Office) -> None:
    waiting = []
    for number in range(MAX_CONNECTIONS + 1):
        waiting.append(office.connect({"id": f"a{number}", "do": "stop"}))
        # Also the last request is read: a flood of others keeps nobody from stopping the job.
        assert office.inbox.receive() == [JobRequest("stop", f"a{number}")]
    assert read_all(waiting[0]) == b""
    for number in range(1, MAX_CONNECTIONS + 1):
        office.inbox.reply(f"a{number}", {"ok": True})
        assert json.loads(read_all(waiting[number])) == {"ok": True}


def test_a_client_that_has_closed_one_direction_gets_its_reply(office: Office) -> None:
    client = office.connect(STOP)
    client.shutdown(socket.SHUT_WR)
    assert office.inbox.receive() == [JobRequest("stop", "a1")]
    assert office.inbox.receive() == []
    office.inbox.reply("a1", {"ok": True})
    assert json.loads(read_all(client)) == {"ok": True}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_for_a_client_the_controller_sleeps(
    office: Office, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(listener: socket.socket) -> None:
        raise OSError(code, os.strerror(code))

    office.connect(STOP)
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", refuse)
        patched.setattr(request_inbox, "ACCEPT_PAUSE", 0.0)
        assert office.is_awake()
        assert office.inbox.receive() == []
        assert not office.is_awake()
    # Accepted as soon as the pause is over.
    assert office.inbox.receive() == [JobRequest("stop", "a1")]


def test_a_job_that_has_no_places_yet_can_be_stopped_and_nothing_else(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    journal = Journal(job.journal)
    journal.create(new_job([TaskSpec(TaskId("worker", 0), NodeId("store-0"))], 1))
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.closing(Wakeup(signal.SIGTERM)) as wakeup, listen_for_requests(job) as listener:
        early = EarlyRequests(job, listener, wakeup)
        assert not early.is_stopped()
        with connect_for_requests(job, PATIENCE) as client:
            client.sendall(json.dumps({"id": "b2", "do": "scale", "workers": 3}).encode() + b"\n")
            wait_readable([wakeup], PATIENCE)
            assert not early.is_stopped()
            assert json.loads(read_all(client))["error"] == "refused"
        with connect_for_requests(job, PATIENCE) as client:
            client.sendall(json.dumps(STOP).encode() + b"\n")
            wait_readable([wakeup], PATIENCE)
            assert early.is_stopped()
            assert json.loads(read_all(client)) == {"ok": True, "text": "stopping every task"}
        assert journal.state().phase == "stopped" and "stop was asked for" in job.output.read_text()
        # What comes then is for a controller.
        early.end()
        with connect_for_requests(job, PATIENCE) as client:
            client.sendall(json.dumps(STOP).encode() + b"\n")
            inbox = RequestInbox(listener, wakeup)
            wait_readable([wakeup], PATIENCE)
            assert inbox.receive() == [JobRequest("stop", "a1")]
            inbox.close()
    signal.signal(signal.SIGTERM, before)
