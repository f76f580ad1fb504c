"""Changes on their way to the mirror, and the answers that wait for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import ServerMoved
from insitu.parameters.connection import Connection
from insitu.parameters.replication_log import ReplicationLog
from insitu.parameters.rules.wire import FAILURE, REPLY, REQUEST, Message

FAR = 1e9
"""Seconds on the monotonic clock that no test reaches."""


class Peer:
    """A connection, and the messages that arrive at its other end."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.connection, self._far = Connection(near), Connection(far)

    def received(self) -> list[tuple[int, int]]:
        self.connection.flush()
        return [(message.kind, message.request) for message in self._far.receive()]

    def close(self) -> None:
        self.connection.close()
        self._far.close()

    def hang_up(self) -> None:
        self._far.close()


@pytest.fixture
def worker() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def mirror() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def change(**meta: Any) -> Message:
    return Message(REQUEST, 1, {"op": "push", **meta}, [np.ones(2)])


def reply(log: ReplicationLog, worker: Peer, request: int) -> None:
    log.reply(worker.connection, Message(REPLY, request, {}), log.append(change()))


def test_without_a_mirror_answers_are_sent_at_once(worker: Peer):
    log = ReplicationLog(0)
    reply(log, worker, 7)
    assert worker.received() == [(REPLY, 7)]
    assert not log.mirrored


def test_answers_wait_until_the_mirror_has_their_change(worker: Peer, mirror: Peer):
    log = ReplicationLog(0)
    log.mirror = mirror.connection
    for request in (7, 8, 9):
        reply(log, worker, request)
    assert mirror.received() == [(REQUEST, 1), (REQUEST, 2), (REQUEST, 3)]
    assert worker.received() == []
    log.acknowledge(2)
    assert log.mirrored
    assert worker.received() == [(REPLY, 7), (REPLY, 8)]
    log.acknowledge(3)
    assert worker.received() == [(REPLY, 9)]


def test_answers_are_sent_when_the_mirror_is_lost(worker: Peer, mirror: Peer):
    log = ReplicationLog(0)
    log.mirror = mirror.connection
    reply(log, worker, 7)
    mirror.hang_up()
    reply(log, worker, 8)
    assert log.mirror is None and not log.mirrored
    assert worker.received() == [(REPLY, 7), (REPLY, 8)]


def test_answers_wait_for_a_mirror_that_is_expected(worker: Peer):
    log = ReplicationLog(0)
    log.mirror_expected_until = FAR
    reply(log, worker, 7)
    log.expire(FAR - 1)
    assert worker.received() == []
    log.expire(FAR)
    assert worker.received() == [(REPLY, 7)]


def test_answers_that_wait_can_be_failed(worker: Peer):
    log = ReplicationLog(0)
    log.mirror_expected_until = FAR
    reply(log, worker, 7)
    log.fail_waiting(ServerMoved("elsewhere"))
    assert worker.received() == [(FAILURE, 7)]


def test_a_change_is_sent_as_it_was(mirror: Peer):
    """A worker may write to its memory again before all of the change is sent."""
    log, array = ReplicationLog(0), np.ones(1 << 20)
    log.mirror = mirror.connection
    log.append(Message(REQUEST, 1, {"op": "push"}, [array]))
    assert mirror.connection.has_unsent
    array[...] = 7
    messages: list[Message] = []
    while not messages:
        mirror.connection.flush()
        messages = mirror._far.receive()
    assert messages[0].meta == {"op": "push", "change": True}
    assert (messages[0].arrays[0] == 1).all()
