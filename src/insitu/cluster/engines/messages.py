"""Turns the calls of an engine into messages, for an engine in another process.

`EngineCalls` asks, `reply_to_call` answers. A call is `{"do": NAME, ...}`; the answer to one that failed is
`{"error": TEXT}`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Protocol

from insitu.base.errors import ClusterError
from insitu.base.progress import Progress
from insitu.base.roster import Roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.decide import Failure
from insitu.cluster.engines.channel import Message
from insitu.cluster.engines.engine import Command, NodeState, ProcessState, TaskObserver, TaskSetup


class EngineCalls:
    """`TaskSetup` and `TaskObserver` of an engine elsewhere. A subclass gives `_request`."""

    def _request(self, message: Message) -> Message:
        """Send a call and return its answer. Raises ClusterError if the call failed."""
        raise NotImplementedError

    def _observe(self, message: Message) -> Message:
        """Send a call of `TaskObserver` and return its answer, or {} where the call failed."""
        with contextlib.suppress(ClusterError):
            return self._request(message)
        return {}

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        reply = self._request({"do": "reserve", "tasks": [(str(t.task), t.node) for t in tasks]})
        return {TaskId.parse(task): address for task, address in reply["addresses"].items()}

    def publish_roster(self, roster: Roster) -> None:
        self._request({"do": "roster", "roster": roster.to_json()})

    def clear_records(self, tasks: Sequence[TaskId]) -> None:
        self._request({"do": "clear", "tasks": list(map(str, tasks))})

    def prepare(self, tasks: Sequence[TaskSpec]) -> bool:
        listed = [(str(t.task), t.node, list(t.shards)) for t in tasks]
        return bool(self._request({"do": "prepare", "tasks": listed})["ready"])

    def read_progress(self, tasks: Sequence[TaskId]) -> dict[TaskId, Progress]:
        reply = self._observe({"do": "progress", "tasks": list(map(str, tasks))})
        return {TaskId.parse(task): Progress(*record) for task, record in reply.get("records", {}).items()}

    def read_failure(self, task: TaskId) -> Failure | None:
        found = self._observe({"do": "failure", "task": str(task)}).get("failure")
        return Failure(**found) if found else None

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        reply = self._observe({"do": "processes", "tasks": list(map(str, tasks))})
        return {TaskId.parse(task): ProcessState(*state) for task, state in reply.get("states", {}).items()}

    def node_states(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeState]:
        reply = self._observe({"do": "nodes", "nodes": list(nodes)})
        return {NodeId(node): NodeState(*state) for node, state in reply.get("states", {}).items()}


class SetupAndObserver(TaskSetup, TaskObserver, Protocol):
    """The part of an engine whose calls `reply_to_call` answers."""


def reply_to_call(engine: SetupAndObserver, message: Message) -> Message:
    """Do what one call of `EngineCalls` asks for. Returns the answer."""
    try:
        return _perform(engine, message)
    except (ClusterError, OSError) as error:
        return {"error": str(error)}


def _perform(engine: SetupAndObserver, message: Message) -> Message:
    tasks = message.get("tasks", [])
    match message["do"]:
        case "reserve":
            found = engine.reserve([TaskSpec(TaskId.parse(t), NodeId(node)) for t, node in tasks])
            return {"addresses": {str(task): address for task, address in found.items()}}
        case "roster":
            engine.publish_roster(Roster.from_json(message["roster"]))
            return {}
        case "clear":
            engine.clear_records(list(map(TaskId.parse, tasks)))
            return {}
        case "prepare":
            specs = [TaskSpec(TaskId.parse(t), NodeId(node), tuple(shards)) for t, node, shards in tasks]
            return {"ready": engine.prepare(specs)}
        case "progress":
            records = engine.read_progress(list(map(TaskId.parse, tasks)))
            return {"records": {str(task): astuple(record) for task, record in records.items()}}
        case "failure":
            failure = engine.read_failure(TaskId.parse(message["task"]))
            return {"failure": asdict(failure) if failure else None}
        case "processes":
            processes = engine.process_states(list(map(TaskId.parse, tasks)))
            return {"states": {str(task): astuple(state) for task, state in processes.items()}}
        case "nodes":
            states = engine.node_states(list(map(NodeId, message["nodes"])))
            return {"states": {node: astuple(state) for node, state in states.items()}}
        case other:
            raise ClusterError(
                f"This engine has no call {other!r}: the controller is of another version of insitu. "
                "Resume the job once both have the same version"
            )


def encode_command(command: Command) -> Message:
    return {"arguments": list(command.arguments), "environment": command.environment}


def decode_command(message: Message) -> Command:
    return Command(tuple(message["arguments"]), message["environment"])
