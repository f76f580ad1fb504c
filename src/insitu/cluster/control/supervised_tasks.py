"""The controller's side of its tasks, which its supervisor holds (see `supervisor.py`)."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from insitu.cluster.control.channel import Channel, ChannelClosed, Message
from insitu.cluster.engines import Command, SignalName
from insitu.errors import ClusterError
from insitu.spec import NodeId, TaskId

_PATIENCE = 60.0
"""Seconds within which the supervisor answers, on any machine."""


@dataclass(frozen=True, slots=True)
class LifeEnded:
    """Life `attempt` of a task has ended, all its output is in the logs. `code` is negative for a signal."""

    task: TaskId
    attempt: int
    code: int


class Tasks(Protocol):
    """What a controller does to its tasks."""

    def living(self) -> dict[TaskId, tuple[int, int]]:
        """(attempt, process id) of each task that lived when this controller began."""

    def reserve(self, tasks: Sequence[TaskId]) -> dict[TaskId, str]:
        """A distinct, free `host:port` for each. Raises ClusterError."""

    def launch(self, task: TaskId, attempt: int, node: NodeId, command: Command) -> int:
        """Begins a life; its process id. Raises ClusterError where that can't be done."""

    def signal(self, task: TaskId, name: SignalName) -> None:
        """Sends to the task (`dump`) or to it and all it has started (`term`, `kill`); no-op once ended."""

    def keep_standby(self, count: int, command: Command) -> None:
        """From now on there are to be `count` warmed processes that can become a task of this command."""

    def wait(self, timeout: float | None) -> list[LifeEnded]:
        """Lives that have ended, as soon as any has; also those that a dead controller didn't write down."""

    def acknowledge(self, ended: LifeEnded) -> None:
        """This end has been written down."""


class SupervisorGone(Exception):
    """The supervisor has ended, and the tasks with it."""


class SupervisedTasks:
    """Asks the supervisor. `wake` is a descriptor that makes `wait` return when it becomes readable."""

    def __init__(self, channel: Channel, wake: int) -> None:
        self._channel = channel
        self._wake = wake
        self._ends: list[LifeEnded] = []
        self._answers: list[Message] = []
        hello = self._answer()
        self._living = {TaskId.parse(t): (int(a), int(p)) for t, a, p in hello["living"]}
        self._ends += [LifeEnded(TaskId.parse(t), int(a), int(c)) for t, a, c in hello["ends"]]

    def living(self) -> dict[TaskId, tuple[int, int]]:
        return self._living

    def reserve(self, tasks: Sequence[TaskId]) -> dict[TaskId, str]:
        answer = self._ask({"do": "reserve", "tasks": list(map(str, tasks))})
        return {TaskId.parse(task): address for task, address in answer["addresses"].items()}

    def launch(self, task: TaskId, attempt: int, node: NodeId, command: Command) -> int:
        answer = self._ask(
            {"do": "launch", "task": str(task), "attempt": attempt, "node": node, **_plain(command)}
        )
        return int(answer["pid"])

    def signal(self, task: TaskId, name: SignalName) -> None:
        self._send({"do": "signal", "task": str(task), "name": name})

    def keep_standby(self, count: int, command: Command) -> None:
        self._send({"do": "standby", "count": count, **_plain(command)})

    def acknowledge(self, ended: LifeEnded) -> None:
        self._send({"do": "acknowledge", "task": str(ended.task), "attempt": ended.attempt})

    def done(self, code: int) -> None:
        """The job is over; the supervisor ends whatever is left and itself."""
        self._send({"do": "done", "code": code})
        deadline = time.monotonic() + _PATIENCE
        while not self._channel.flush() and time.monotonic() < deadline:
            time.sleep(0.01)

    def wait(self, timeout: float | None) -> list[LifeEnded]:
        if not self._ends:
            self._listen(timeout, self._wake)
        ends, self._ends = self._ends, []
        return ends

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise SupervisorGone from error

    def _ask(self, message: Message) -> Message:
        self._send(message)
        return self._answer()

    def _answer(self) -> Message:
        deadline = time.monotonic() + _PATIENCE
        while not self._answers:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SupervisorGone
            self._listen(left)
        answer = self._answers.pop(0)
        if "error" in answer:
            raise ClusterError(str(answer["error"]))
        return answer

    def _listen(self, timeout: float | None, *more: int) -> None:
        """Takes in what has come, after `timeout` seconds at the latest."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        for descriptor in more:
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout is None else max(0, int(timeout * 1000) + (timeout > 0)))
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except ChannelClosed as error:
            raise SupervisorGone from error
        for message in messages:
            if "ended" in message:
                self._ends.append(
                    LifeEnded(TaskId.parse(message["ended"]), int(message["attempt"]), int(message["code"]))
                )
            else:
                self._answers.append(message)


def _plain(command: Command) -> Message:
    return {
        "arguments": list(command.arguments),
        "environment": command.environment,
        "folder": os.fspath(command.folder),
    }
