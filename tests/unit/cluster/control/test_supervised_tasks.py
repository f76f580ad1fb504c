"""The controller's side of the channel to its supervisor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from insitu.base.errors import ClusterError
from insitu.base.roster import Roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.control.supervised_tasks import SupervisedTasks, SupervisorLost, TaskExit
from insitu.cluster.engines.channel import Channel, open_channel_pair
from insitu.cluster.engines.engine import Command
from insitu.cluster.engines.messages import reply_to_call
from insitu.cluster.engines.wakeup import Wakeup

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
COMMAND = Command(("python", "train.py"), {"A": "1"})
ROSTER = Roster(4, ())
PATIENCE = 60.0


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """The supervisor's end and the controller's."""
    ends = open_channel_pair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def supervisor(channels: tuple[Channel, Channel]) -> Channel:
    return channels[0]


@pytest.fixture
def wake() -> Iterator[tuple[int, int]]:
    """(read, write) ends of the pipe that ends a wait."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def tasks(channels: tuple[Channel, Channel], wake: tuple[int, int]) -> SupervisedTasks:
    channels[0].send(
        {
            "running": [["worker:0", 2, 41]],
            "roster": ROSTER.to_json(),
            "exits": [["worker:1", 1, -9]],
        }
    )
    return SupervisedTasks(channels[1], wake[0])


def test_the_first_message_tells_what_there_is(tasks: SupervisedTasks):
    assert tasks.running() == {W0: (2, 41)}
    assert tasks.published_roster() == ROSTER
    assert tasks.wait(0) == [TaskExit(W1, 1, -9)]
    assert tasks.wait(0) == []


def test_ends_that_come_before_an_answer_are_kept(tasks: SupervisedTasks, supervisor: Channel):
    tasks.wait(0)
    supervisor.send({"ended": "worker:0", "incarnation": 2, "code": 1})
    supervisor.send({"pid": 77})
    assert tasks.launch(TaskSpec(W1, NodeId("node-0"), (1, 3)), 5, COMMAND) == 77
    assert tasks.wait(PATIENCE) == [TaskExit(W0, 2, 1)]
    assert supervisor.receive() == [
        {
            "do": "launch",
            "task": "worker:1",
            "incarnation": 5,
            "node": "node-0",
            "shards": [1, 3],
            "arguments": ["python", "train.py"],
            "environment": {"A": "1"},
        }
    ]


def test_an_answer_may_be_an_error(tasks: SupervisedTasks, supervisor: Channel):
    supervisor.send({"error": "no such node"})
    with pytest.raises(ClusterError, match="no such node"):
        tasks.launch(TaskSpec(W1, NodeId("node-9")), 1, COMMAND)


def test_requests_without_an_answer_are_sent_at_once(tasks: SupervisedTasks, supervisor: Channel):
    tasks.signal(W0, "term")
    tasks.keep_standby(2, COMMAND)
    tasks.acknowledge(TaskExit(W1, 1, -9))
    tasks.finish(3, "no journal")
    assert supervisor.receive() == [
        {"do": "signal", "task": "worker:0", "name": "term"},
        {
            "do": "standby",
            "count": 2,
            "arguments": ["python", "train.py"],
            "environment": {"A": "1"},
        },
        {"do": "acknowledge", "task": "worker:1", "incarnation": 1},
        {"do": "finish", "code": 3, "reason": "no journal"},
    ]


def test_a_wait_ends_when_the_descriptor_is_readable(tasks: SupervisedTasks, wake: tuple[int, int]):
    tasks.wait(0)
    os.write(wake[1], b"x")
    assert tasks.wait(PATIENCE) == []


def test_the_end_of_the_supervisor_is_noticed(tasks: SupervisedTasks, supervisor: Channel):
    tasks.wait(0)
    supervisor.close()
    with pytest.raises(SupervisorLost):
        tasks.wait(PATIENCE)
    with pytest.raises(SupervisorLost):
        tasks.signal(W0, "kill")
    with pytest.raises(SupervisorLost):
        tasks.launch(TaskSpec(W1, NodeId("node-0")), 1, COMMAND)


class FailingEngine:
    """An engine whose disk fails at each call."""

    def __getattr__(self, name: str) -> object:
        def fail(*arguments: object) -> None:
            raise OSError("Stale file handle")

        return fail


class Connected:
    """A controller's `tasks` and the `supervisor`'s end of their channel."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self.supervisor, other = open_channel_pair()
        self.supervisor.send({"running": [], "roster": None, "exits": []})
        self.tasks = SupervisedTasks(other, self._wakeup.fileno())
        self._other = other

    def fail(self, call: str, **values: object) -> None:
        """The reply to a call that will fail is sent before it has come."""
        reply = reply_to_call(FailingEngine(), {"do": call, **values})  # type: ignore[arg-type]
        assert reply == {"error": "Stale file handle"}
        self.supervisor.send(reply)

    def close(self) -> None:
        for closed in (self.supervisor, self._other, self._wakeup):
            closed.close()


@pytest.fixture
def connected() -> Iterator[Connected]:
    made = Connected()
    yield made
    made.close()


def test_what_cannot_be_observed_is_left_out(connected: Connected) -> None:
    connected.fail("progress", tasks=["worker:0"])
    assert connected.tasks.read_progress([W0]) == {}
    connected.fail("failure", task="worker:0")
    assert connected.tasks.read_failure(W0) is None
    connected.fail("processes", tasks=["worker:0"])
    assert connected.tasks.process_states([W0]) == {}
    connected.fail("nodes", nodes=["node-0"])
    assert connected.tasks.node_states([NodeId("node-0")]) == {}


def test_what_cannot_be_set_up_is_an_error(connected: Connected) -> None:
    connected.fail("clear", tasks=["worker:0"])
    with pytest.raises(ClusterError, match="Stale file handle"):
        connected.tasks.clear_records([W0])
