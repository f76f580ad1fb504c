"""The controller's side of its tasks, which its supervisor holds (see `supervisor.py`)."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from insitu.base.errors import ClusterError
from insitu.base.roster import Roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines import (
    Channel,
    ChannelClosed,
    Command,
    EngineCalls,
    Message,
    SignalName,
    TaskObserver,
    TaskSetup,
    encode_command,
)

BEAT_INTERVAL = 5.0
"""Seconds within which a controller reports to its supervisor that it is alive."""
_REPLY_TIMEOUT = 60.0
"""Seconds within which the supervisor answers, on any machine."""


@dataclass(frozen=True, slots=True)
class TaskExit:
    """The end of an incarnation of a task, all of whose output is in the logs."""

    #: The task that ended.
    task: TaskId
    #: Number of its incarnation.
    incarnation: int
    #: Its exit code, negative for a signal.
    code: int


class Tasks(TaskSetup, TaskObserver, Protocol):
    """Lets a controller act on its tasks and observe them."""

    def running(self) -> dict[TaskId, tuple[int, int]]:
        """Return (incarnation, process id) of each task that lived when this controller began."""

    def published_roster(self) -> Roster | None:
        """Return the newest roster that a controller before this one has published, or None."""

    def launch(self, task: TaskSpec, incarnation: int, command: Command) -> int:
        """Launch an incarnation and return its process id. Raises ClusterError."""

    def signal(self, task: TaskId, name: SignalName) -> None:
        """Send to the task (`dump`) or to it and all it has started (`term`, `kill`); no-op once ended."""

    def keep_standby(self, count: int, command: Command) -> None:
        """Keep `count` warmed processes from now on that can become a task of this command."""

    def wait(self, timeout: float | None) -> list[TaskExit]:
        """Return ends once there are any, also those that a dead controller did not acknowledge."""

    def acknowledge(self, ended: TaskExit) -> None:
        """Report that this end has been written down."""

    def beat(self) -> None:
        """Report that this controller is alive, as `wait` does too."""


class SupervisorLost(Exception):
    """The supervisor has ended, and the tasks with it."""


class SupervisedTasks(EngineCalls):
    """Asks the supervisor. `wake` is a descriptor that makes `wait` return when it becomes readable."""

    def __init__(self, channel: Channel, wake: int) -> None:
        self._channel = channel
        self._wake = wake
        self._exits: list[TaskExit] = []
        self._replies: list[Message] = []
        self._last_beat = time.monotonic()
        first_reply = self._wait_for_reply()
        self._running = {TaskId.parse(t): (int(a), int(p)) for t, a, p in first_reply["running"]}
        self._roster = Roster.from_json(first_reply["roster"]) if first_reply["roster"] else None
        self._exits += [TaskExit(TaskId.parse(t), int(a), int(c)) for t, a, c in first_reply["exits"]]

    def running(self) -> dict[TaskId, tuple[int, int]]:
        return self._running

    def published_roster(self) -> Roster | None:
        return self._roster

    def launch(self, task: TaskSpec, incarnation: int, command: Command) -> int:
        reply = self._request(
            {
                "do": "launch",
                "task": str(task.task),
                "incarnation": incarnation,
                "node": task.node,
                "shards": list(task.shards),
                **encode_command(command),
            }
        )
        return int(reply["pid"])

    def signal(self, task: TaskId, name: SignalName) -> None:
        self._send({"do": "signal", "task": str(task), "name": name})

    def keep_standby(self, count: int, command: Command) -> None:
        self._send({"do": "standby", "count": count, **encode_command(command)})

    def acknowledge(self, ended: TaskExit) -> None:
        self._send({"do": "acknowledge", "task": str(ended.task), "incarnation": ended.incarnation})

    def finish(self, code: int, reason: str = "") -> None:
        """End the job: the supervisor ends whatever is left, and itself.

        `reason` says why the controller gave up; "" if the journal has the job's end.
        """
        self._send({"do": "finish", "code": code, "reason": reason})
        deadline = time.monotonic() + _REPLY_TIMEOUT
        while not self._channel.flush() and time.monotonic() < deadline:
            time.sleep(0.01)

    def beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= BEAT_INTERVAL / 2:
            self._last_beat = now
            self._send({"do": "beat"})

    def wait(self, timeout: float | None) -> list[TaskExit]:
        self.beat()
        if not self._exits:
            self._receive(BEAT_INTERVAL if timeout is None else min(timeout, BEAT_INTERVAL), self._wake)
        ends, self._exits = self._exits, []
        return ends

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise SupervisorLost from error

    def _request(self, message: Message) -> Message:
        self._send(message)
        return self._wait_for_reply()

    def _wait_for_reply(self) -> Message:
        deadline = time.monotonic() + _REPLY_TIMEOUT
        while not self._replies:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SupervisorLost
            self._receive(left)
        reply = self._replies.pop(0)
        if "error" in reply:
            raise ClusterError(str(reply["error"]))
        return reply

    def _receive(self, timeout: float | None, *more: int) -> None:
        """Take in what has come, after `timeout` seconds at the latest."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.unsent_bytes else 0))
        for descriptor in more:
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout is None else max(0, int(timeout * 1000) + (timeout > 0)))
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except ChannelClosed as error:
            raise SupervisorLost from error
        for message in messages:
            if "ended" in message:
                self._exits.append(
                    TaskExit(
                        TaskId.parse(message["ended"]), int(message["incarnation"]), int(message["code"])
                    )
                )
            else:
                self._replies.append(message)


def has_room_for_standby(tasks: TaskObserver, members: Sequence[TaskId], node: NodeId | None) -> bool:
    """Return whether a node has memory for one more process that is as large as the largest of `members`."""
    processes = tasks.process_states(members).values()
    nodes = tasks.node_states([node] if node else []).values()
    most = max((state.resident_bytes for state in processes), default=0)
    available = min((state.available_bytes for state in nodes), default=0)
    return available > 2 * most > 0
