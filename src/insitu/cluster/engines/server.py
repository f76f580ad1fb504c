"""Runs the tasks of one job on this machine for a `RemoteEngine` elsewhere.

`python -P -m insitu.cluster.engines.server JOB_FOLDER DESCRIPTOR`, where the descriptor is a connected stream
socket. It ends with the connection, and nothing that it started outlives it.
"""

from __future__ import annotations

import base64
import os
import select
import signal
import socket
import sys
from pathlib import Path

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.process.processes import adopt_orphans, end_all_children
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines.channel import Channel, ChannelClosed, Message
from insitu.cluster.engines.engine import Engine, Output
from insitu.cluster.engines.local import LocalEngine
from insitu.cluster.engines.messages import decode_command, reply_to_call
from insitu.cluster.engines.wakeup import Wakeup

MAX_UNSENT_BYTES = 1 << 22
"""With so much output waiting for the other end no more is read: the tasks that print it must wait."""


class EngineServer:
    """Performs the calls that come over `channel`, and reports what happened to the tasks.

    `engine` must return from `wait` when `wakeup` becomes readable.
    """

    def __init__(self, engine: Engine, channel: Channel, wakeup: Wakeup) -> None:
        self._engine = engine
        self._channel = channel
        self._wakeup = wakeup
        self._is_closed = False

    def serve(self) -> None:
        """Return once the other end has closed, or asked to close. Nothing runs any more then."""
        try:
            while not self._is_closed:
                self._wakeup.watch(self._channel, writable=self._channel.unsent_bytes > 0)
                if self._channel.unsent_bytes < MAX_UNSENT_BYTES:
                    self._report()
                else:
                    self._wait_for_other_end()
                self._wakeup.take_signals()
                self._channel.flush()
                for message in self._channel.receive():
                    self._perform(message)
        except ChannelClosed:
            pass
        finally:
            self._engine.close()

    def _wait_for_other_end(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | select.POLLOUT)
        poll.poll()

    def _report(self) -> None:
        """Wait for whatever happens next."""
        for event in self._engine.wait(None):
            if isinstance(event, Output):
                data = base64.b64encode(event.data).decode()
                self._channel.send({"output": str(event.task), "data": data})
            else:
                self._channel.send({"ended": str(event.task), "code": event.code})

    def _perform(self, message: Message) -> None:
        match message["do"]:
            case "launch":
                self._channel.send(self._launch(message))
            case "standby":
                self._engine.keep_standby(int(message["count"]), decode_command(message))
            case "signal":
                self._engine.signal(TaskId.parse(message["task"]), message["name"])
            case "close":
                self._is_closed = True
            case _:
                self._channel.send(reply_to_call(self._engine, message))

    def _launch(self, message: Message) -> Message:
        task = TaskSpec(TaskId.parse(message["task"]), NodeId(message["node"]))
        try:
            return {"pid": self._engine.launch(task, decode_command(message))}
        except (ClusterError, OSError) as error:
            return {"error": str(error)}


def main(arguments: list[str]) -> int:
    job, descriptor = JobPaths(Path(arguments[0])), int(arguments[1])
    os.set_inheritable(descriptor, False)
    adopt_orphans()
    wakeup = Wakeup(signal.SIGCHLD)
    # What ends it is the end of its connection.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=descriptor)
    engine = LocalEngine(job, wakeup.fileno(), reap_orphans=True)
    EngineServer(engine, Channel(connection), wakeup).serve()
    end_all_children()
    # The other end learns by this that nothing is left.
    connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
