"""The sockets on which the tasks of a job listen: bound when an address is chosen, and handed down."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import replace

from insitu.cluster.engines.engine import Command
from insitu.ports import LISTENER_ENV, describe_listener, hold_port, stop_listening
from insitu.spec import TaskId


class TaskListeners:
    """Holds the bound sockets of one job's tasks on one host.

    A socket stays open here while its task lives, and after its end: so the port stays the job's where the
    next incarnation listens on it, too.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        #: Sockets of addresses that were reserved, and whose tasks haven't been launched since.
        self._reserved: dict[TaskId, socket.socket] = {}
        #: The socket that each task's newest process has.
        self._handed: dict[TaskId, socket.socket] = {}

    def reserve(self, tasks: Sequence[TaskId], running: Collection[TaskId]) -> dict[TaskId, str]:
        """Return a distinct `host:port` for each task; one that runs keeps what it was launched with.

        Addresses of an earlier call that weren't used are let go of. Raises ClusterError.
        """
        self._release(self._reserved)
        addresses = {}
        for task in tasks:
            held = self._handed.get(task) if task in running else None
            if held is None:
                held = self._reserved[task] = hold_port(self._host)
            host = f"[{self._host}]" if ":" in self._host else self._host
            addresses[task] = f"{host}:{held.getsockname()[1]}"
        for task in self._reserved.keys() & running:
            # It was launched without a socket, and will open the port itself.
            self._reserved.pop(task).close()
        return addresses

    def take(self, task: TaskId) -> socket.socket | None:
        """Return the socket for a process of `task` that is about to start; it stays this object's.

        That is the one that was reserved last, else the one that the process before had.
        """
        if reserved := self._reserved.pop(task, None):
            self._forget(task)
            self._handed[task] = reserved
        held = self._handed.get(task)
        if held is not None:
            # The process before has listened on it alone; this one may be a program that can't take it over.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return held

    def stop_listening(self, task: TaskId) -> None:
        """Have callers refused at the address of a task that has ended. Its port stays bound."""
        if held := self._handed.get(task):
            stop_listening(held)

    def close(self) -> None:
        """Let go of all ports."""
        self._release(self._reserved)
        self._release(self._handed)

    def _forget(self, task: TaskId) -> None:
        if held := self._handed.pop(task, None):
            held.close()

    @staticmethod
    def _release(sockets: dict[TaskId, socket.socket]) -> None:
        for held in sockets.values():
            held.close()
        sockets.clear()


def with_listener(command: Command, listener: socket.socket | None) -> Command:
    """Return `command` for a process that inherits `listener` by the same descriptor."""
    environment = {name: value for name, value in command.environment.items() if name != LISTENER_ENV}
    if listener is not None:
        environment[LISTENER_ENV] = describe_listener(listener)
    return replace(command, environment=environment)
