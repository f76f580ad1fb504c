"""The caller's side of an engine in another process; `tests/process/test_jobs_engine.py` has the rest."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator

import pytest

from insitu.base.errors import ClusterError
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines.channel import Channel
from insitu.cluster.engines.engine import Command, Ended, Output
from insitu.cluster.engines.remote import RemoteEngine

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
NODE = NodeId("node-0")
COMMAND = Command(("python", "train.py"), {"A": "1"})
PATIENCE = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[RemoteEngine, Channel]]:
    """An engine and the channel of its server."""
    ours, its = socket.socketpair()
    with ours:
        server = Channel(its)
        yield RemoteEngine(ours), server
        server.close()


def launch(engine: RemoteEngine, server: Channel, task: TaskId) -> None:
    server.send({"pid": 7})
    assert engine.launch(TaskSpec(task, NODE), COMMAND) == 7


def test_what_happens_is_told_in_order(ends: tuple[RemoteEngine, Channel]):
    engine, server = ends
    server.send({"output": "worker:0", "data": base64.b64encode(b"\xffa\n").decode()})
    launch(engine, server, W0)
    server.send({"ended": "worker:0", "code": 3})
    assert engine.wait(PATIENCE) == [Output(W0, b"\xffa\n")]
    assert engine.wait(PATIENCE) == [Ended(W0, 3)]


def test_an_error_is_raised_by_a_call_and_not_by_a_look(ends: tuple[RemoteEngine, Channel]):
    engine, server = ends
    server.send({"error": "no such node"})
    with pytest.raises(ClusterError, match="no such node"):
        engine.launch(TaskSpec(W0, NODE), COMMAND)
    server.send({"error": "no such task"})
    assert engine.read_progress([W0]) == {}


def test_the_tasks_of_a_lost_server_have_ended(ends: tuple[RemoteEngine, Channel]):
    engine, server = ends
    launch(engine, server, W0)
    launch(engine, server, W1)
    server.send({"ended": "worker:0", "code": 0})
    server.close()
    assert engine.wait(PATIENCE) == [Ended(W0, 0)]
    assert engine.wait(PATIENCE) == [Ended(W1, -9)]
    with pytest.raises(ClusterError, match="has ended or doesn't answer"):
        engine.launch(TaskSpec(W0, NODE), COMMAND)
    engine.signal(W1, "term")
    engine.close()


def test_a_wait_ends_when_the_descriptor_is_readable():
    ours, its = socket.socketpair()
    reader, writer = os.pipe()
    with ours, its:
        os.write(writer, b"x")
        assert RemoteEngine(ours, wake=reader).wait(PATIENCE) == []
    os.close(reader)
    os.close(writer)
