"""What a controller makes of a supervisor that can't do what it asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from insitu.cluster.control.supervised_tasks import SupervisedTasks
from insitu.cluster.engines.channel import open_channel_pair
from insitu.cluster.engines.messages import reply_to_call
from insitu.cluster.engines.wakeup import Wakeup
from insitu.errors import ClusterError
from insitu.spec import NodeId, TaskId

W0 = TaskId("worker", 0)


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
