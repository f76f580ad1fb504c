"""An engine in another process, at the other end of a connected socket: the first part of an agent per node.

The connection must be trusted: the process at its other end can run any program here. Today both ends are
inherited on one machine; over a network it needs a handshake and encryption first.
"""

from __future__ import annotations

import base64
import os
import select
import signal
import socket
import subprocess
import sys
import time

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId, TaskSpec
from insitu.cluster.engines.channel import Channel, ChannelClosed, Message
from insitu.cluster.engines.engine import Command, Ended, Output, SignalName
from insitu.cluster.engines.messages import EngineCalls, encode_command

_REPLY_TIMEOUT = 60.0
"""Seconds within which the server answers, on any machine."""


class RemoteEngine(EngineCalls):
    """Asks the engine server at the other end of `connection`; see `server.py`.

    `wake` makes `wait` return when it becomes readable; its owner reads it. `process` is the server's, where
    this process started it.

    When the server is lost its tasks count as killed, since they die with it; their last output is lost.
    From then on nothing can be launched. A server on another machine may live on where only the connection
    is lost: it ends its tasks once it notices, which may be later.
    """

    reply_timeout = _REPLY_TIMEOUT
    """Seconds within which the server answers a call."""

    def __init__(
        self,
        connection: socket.socket | Channel,
        wake: int | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._channel = connection if isinstance(connection, Channel) else Channel(connection)
        self._wake = wake
        self._process = process
        self._is_lost = False
        self._running: set[TaskId] = set()
        self._happened: list[Output | Ended] = []
        self._replies: list[Message] = []

    @property
    def is_lost(self) -> bool:
        """True from when the server has ended or can't be reached any more."""
        return self._is_lost

    def launch(self, task: TaskSpec, command: Command) -> int:
        call = {"do": "launch", "task": str(task.task), "node": task.node, **encode_command(command)}
        pid = int(self._request(call)["pid"])
        self._running.add(task.task)
        return pid

    def keep_standby(self, count: int, command: Command) -> None:
        self._send({"do": "standby", "count": count, **encode_command(command)})

    def signal(self, task: TaskId, name: SignalName) -> None:
        self._send({"do": "signal", "task": str(task), "name": name})

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        if not self._happened:
            self._receive(timeout, self._wake)
        happened, self._happened = self._happened, []
        for event in happened:
            if isinstance(event, Ended):
                self._running.discard(event.task)
        return happened

    def close(self) -> None:
        self._send({"do": "close"})
        deadline = time.monotonic() + _REPLY_TIMEOUT
        # It closes its end once nothing runs any more.
        while not self._is_lost and time.monotonic() < deadline:
            self._receive(deadline - time.monotonic())
        self._lose_server()
        if self._process is not None:
            self._process.wait()

    def _send(self, message: Message) -> None:
        if not self._is_lost:
            try:
                self._channel.send(message)
            except ChannelClosed:
                self._lose_server()

    def _request(self, message: Message) -> Message:
        self._send(message)
        return self._wait_for_reply()

    def _wait_for_reply(self) -> Message:
        """Return the answer to the call that was sent first of those unanswered. Raises ClusterError."""
        deadline = time.monotonic() + self.reply_timeout
        while not self._replies and not self._is_lost:
            if time.monotonic() > deadline:
                # A late answer would be taken for that to the next call.
                self._lose_server()
            self._receive(max(0.0, deadline - time.monotonic()))
        if not self._replies:
            raise ClusterError(self._describe_loss())
        reply = self._replies.pop(0)
        if "error" in reply:
            raise ClusterError(str(reply["error"]))
        return reply

    def _describe_loss(self) -> str:
        """Return why a call got no answer."""
        return (
            "The engine's server has ended or doesn't answer, so its tasks count as killed. Check "
            "the memory of its machine, then `insitu resume` the job"
        )

    def _receive(self, timeout: float | None, *more: int | None) -> None:
        """Take in what comes within `timeout` seconds, at most until one of `more` is readable."""
        poll = select.poll()
        if not self._is_lost:
            poll.register(
                self._channel, select.POLLIN | (select.POLLOUT if self._channel.unsent_bytes else 0)
            )
        for descriptor in more:
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout is None else max(0, int(timeout * 1000) + (timeout > 0)))
        if self._is_lost:
            return
        try:
            self._channel.flush()
            messages = self._channel.receive()
            while messages or self._channel.has_buffered:
                for message in messages:
                    self._take(message)
                # What has been decrypted doesn't make the descriptor readable again.
                messages = self._channel.receive() if self._channel.has_buffered else []
        except ChannelClosed:
            self._lose_server()

    def _take(self, message: Message) -> None:
        """Take in one message of the server's."""
        if "output" in message:
            data = base64.b64decode(message["data"])
            self._happened.append(Output(TaskId.parse(message["output"]), data))
        elif "ended" in message:
            self._happened.append(Ended(TaskId.parse(message["ended"]), int(message["code"])))
        else:
            self._replies.append(message)

    def _lose_server(self) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._channel.close()
        if self._process is not None:
            # One that hangs may come back, and its tasks with it.
            self._process.kill()
        known = {event.task for event in self._happened if isinstance(event, Ended)}
        self._happened += [Ended(task, -signal.SIGKILL) for task in sorted(self._running - known)]


def start_engine_server(job: JobPaths, wake: int | None = None) -> RemoteEngine:
    """Start an engine server for `job` on this machine. Raises ClusterError."""
    ours, its = socket.socketpair()
    with its:
        number = its.fileno()
        command = [sys.executable, "-P", "-m", "insitu.cluster.engines.server", str(job.root), str(number)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=os.environ.copy(),
                pass_fds=(number,),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ClusterError(
                f"Can't start the engine's server: {error}. Check the memory and the number of processes "
                "that this user may have (ulimit -u)"
            ) from error
    return RemoteEngine(ours, wake, process)
