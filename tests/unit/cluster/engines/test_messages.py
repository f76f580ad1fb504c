"""The calls of an engine, as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from insitu.base.errors import ClusterError
from insitu.base.progress import Progress
from insitu.base.roster import Member, Roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.decide.job_state import Failure
from insitu.cluster.engines.channel import Message
from insitu.cluster.engines.engine import Command, NodeState, ProcessState
from insitu.cluster.engines.messages import EngineCalls, decode_command, encode_command, reply_to_call

W0, PS1 = TaskId("worker", 0), TaskId("ps", 1)
NODE = NodeId("node-0")
FAILURE = Failure("ValueError", "no", "abc", peer_lost=True)
PROGRESS = Progress(1, 2, 3, 4.5, "exchange", elastic=True, generation=6)


class FixedEngine:
    """Knows of W0 alone. Keeps what it is told."""

    def __init__(self) -> None:
        self.rosters: list[Roster] = []
        self.cleared: list[TaskId] = []

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        if not tasks:
            raise ClusterError("nothing to reserve for")
        return {t.task: f"{t.node}:{20_000 + i}" for i, t in enumerate(tasks)}

    def publish_roster(self, roster: Roster) -> None:
        if self.rosters:
            raise OSError(28, "No space left on device")
        self.rosters.append(roster)

    def clear_records(self, tasks: Sequence[TaskId]) -> None:
        self.cleared += tasks

    def prepare(self, tasks: Sequence[TaskSpec]) -> bool:
        return tasks == [TaskSpec(W0, NODE, (1, 2))]

    def read_progress(self, tasks: Sequence[TaskId]) -> dict[TaskId, Progress]:
        return {task: PROGRESS for task in tasks if task == W0}

    def read_failure(self, task: TaskId) -> Failure | None:
        return FAILURE if task == W0 else None

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        return {task: ProcessState(True, 7, 1.5) for task in tasks if task == W0}

    def node_states(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeState]:
        return {node: NodeState(8, False) for node in nodes}


class CallsAsJson(EngineCalls):
    """Passes calls and answers on as text."""

    def __init__(self, engine: FixedEngine) -> None:
        self._engine = engine

    def _request(self, message: Message) -> Message:
        reply: Message = json.loads(json.dumps(reply_to_call(self._engine, json.loads(json.dumps(message)))))
        if "error" in reply:
            raise ClusterError(reply["error"])
        return reply


@pytest.fixture
def engine() -> FixedEngine:
    return FixedEngine()


def test_observations_arrive_as_they_were(engine: FixedEngine):
    calls = CallsAsJson(engine)
    assert calls.read_progress([W0, PS1]) == {W0: PROGRESS}
    assert calls.read_failure(W0) == FAILURE
    assert calls.read_failure(PS1) is None
    assert calls.process_states([W0, PS1]) == {W0: ProcessState(True, 7, 1.5)}
    assert calls.node_states([NODE]) == {NODE: NodeState(8, False)}


def test_preparations_arrive_as_they_were(engine: FixedEngine):
    calls = CallsAsJson(engine)
    roster = Roster(2, (Member(W0, 3, "node-0:20000", (0, 2)),), (Member(PS1, 1, "node-0:20001"),))
    addresses = calls.reserve([TaskSpec(W0, NODE), TaskSpec(PS1, NODE)])
    assert addresses == {W0: "node-0:20000", PS1: "node-0:20001"}
    calls.publish_roster(roster)
    calls.clear_records([W0, PS1])
    assert calls.prepare([TaskSpec(W0, NODE, (1, 2))]) and not calls.prepare([TaskSpec(PS1, NODE)])
    assert engine.rosters == [roster] and engine.cleared == [W0, PS1]


def test_a_call_that_fails_is_answered_with_the_error(engine: FixedEngine):
    calls = CallsAsJson(engine)
    with pytest.raises(ClusterError, match="nothing to reserve for"):
        calls.reserve([])
    calls.publish_roster(Roster(1, ()))
    with pytest.raises(ClusterError, match="No space left on device"):
        calls.publish_roster(Roster(2, ()))
    assert "no call 'dance'" in str(reply_to_call(engine, {"do": "dance"})["error"])


def test_a_command_arrives_as_it_was():
    command = Command(("python", "train.py", "é"), {"A": "1", "B": ""})
    assert decode_command(json.loads(json.dumps(encode_command(command)))) == command
