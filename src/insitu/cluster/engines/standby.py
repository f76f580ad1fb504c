"""Processes that are warm before they are needed: backend and imports loaded, waiting to become a task.

The engine's side. What happens in the process itself is in `insitu.cluster.task.preload`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from insitu.base.context import CONTRACT_ENVS, JOB_ID_ENV
from insitu.base.net.ports import LISTENER_ENV
from insitu.base.paths import HOME_ENV
from insitu.base.process.processes import END_TIMEOUT, raise_priority
from insitu.cluster.engines.engine import Command
from insitu.cluster.task import STANDBY_OPTION

_READS = 16
"""Reads of a standby's output at a time."""
_MAX_FAILURES = 3
"""Standbys that may end by themselves before no more are started: then the script can't be preloaded."""


def start_process(
    command: Command, folder: Path, *, inherit: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a process of its own session whose output comes through one pipe. Raises OSError."""
    return subprocess.Popen(
        command.arguments,
        env=command.environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        bufsize=0,
        pass_fds=inherit,
    )


@dataclass(eq=False, slots=True)
class Standby:
    """One process that stands by. What it prints before it becomes a task is dropped."""

    #: The process; its output comes through a pipe.
    process: subprocess.Popen[bytes]
    #: The socket on which it receives the environment of the task that it becomes.
    connection: socket.socket
    #: The fixed part of the command of the tasks that it can become; see `select_fixed_part`.
    fits: Command


def select_fixed_part(command: Command) -> Command:
    """Return `command` without what a running process can still be given: the contract's names."""
    given = {*CONTRACT_ENVS, LISTENER_ENV}
    rest = {name: value for name, value in command.environment.items() if name not in given}
    return Command(command.arguments, rest)


class StandbyPool:
    """Keeps as many as asked for in `folder`; owned by an engine, in whose selector their pipes are."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path) -> None:
        self._selector = selector
        self._folder = folder
        self._processes: list[Standby] = []
        self._failures = 0

    @property
    def pids(self) -> set[int]:
        return {standby.process.pid for standby in self._processes}

    def keep(self, count: int, command: Command) -> None:
        fits = select_fixed_part(command)
        for standby in list(self._processes):
            if standby.fits != fits or len(self._processes) > count:
                self._end(standby)
        while len(self._processes) < count and self._failures < _MAX_FAILURES:
            try:
                self._start(command, fits)
            except OSError:
                # No room for another process: the job does without.
                self._failures += 1

    def _start(self, command: Command, fits: Command) -> None:
        # It is no task yet, and must not be taken for one.
        kept = {name: command.environment[name] for name in (HOME_ENV, JOB_ID_ENV)}
        environment = fits.environment | kept
        ours, its = socket.socketpair()
        with its:
            number = its.fileno()
            # (interpreter, -P, -m, module) then the option; JOB_CMD follows.
            arguments = (*command.arguments[:4], STANDBY_OPTION, str(number), *command.arguments[4:])
            try:
                process = start_process(Command(arguments, environment), self._folder, inherit=(number,))
            except OSError:
                ours.close()
                raise
        standby = Standby(process, ours, fits)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, standby)
        self._processes.append(standby)

    def activate(self, command: Command, listener: socket.socket | None) -> subprocess.Popen[bytes] | None:
        """Return a process that turns into `command` now, or None where none stands by that could.

        It gets `listener`, the bound socket of its task.
        """
        fits = select_fixed_part(command)
        for standby in list(self._processes):
            if standby.fits != fits:
                continue
            self._drop_output(standby)
            self._processes.remove(standby)
            if standby.process.stdout is not None:
                self._selector.unregister(standby.process.stdout)
            message = json.dumps({"environment": command.environment}).encode()
            try:
                with standby.connection as connection:
                    descriptors = [] if listener is None else [listener.fileno()]
                    sent = socket.send_fds(connection, [message], descriptors)
                    connection.sendall(message[sent:])
                    # Closing alone ends nothing: a controller forked meanwhile holds this end as well.
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                self._reap(standby)
                continue
            # It may still be loading, at a priority at which a busy machine would hardly let it.
            raise_priority(standby.process.pid)
            return standby.process
        return None

    def handle_output(self, standby: Standby) -> None:
        """Read what a standby printed, and end it where its stream has ended. Its pipe is readable."""
        if standby in self._processes and self._drop_output(standby):
            self._failures += 1
            self._end(standby)

    @staticmethod
    def _drop_output(standby: Standby) -> bool:
        """Return True where the end of the stream was reached."""
        if standby.process.stdout is None:
            return True
        # Bounded: something that it started may write faster than this reads.
        with contextlib.suppress(BlockingIOError):
            return not all(os.read(standby.process.stdout.fileno(), 1 << 16) for _ in range(_READS))
        return False

    def _end(self, standby: Standby) -> None:
        self._processes.remove(standby)
        if standby.process.stdout is not None:
            self._selector.unregister(standby.process.stdout)
        standby.connection.close()
        self._reap(standby)

    @staticmethod
    def _reap(standby: Standby) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(standby.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            standby.process.wait(END_TIMEOUT)
        if standby.process.stdout is not None:
            standby.process.stdout.close()

    def close(self) -> None:
        for standby in list(self._processes):
            self._end(standby)
