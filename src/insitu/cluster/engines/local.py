"""The local engine: every node is this machine, every task a process of its own session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import replace

from insitu.base.disk.durable import is_missing
from insitu.base.errors import ClusterError
from insitu.base.net.ports import LISTENER_ENV, describe_listener, hold_port, stop_listening
from insitu.base.paths import JobPaths, Paths
from insitu.base.process.processes import (
    END_TIMEOUT,
    is_stopped,
    read_available_bytes,
    read_cpu_seconds,
    read_resident_bytes,
)
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines.engine import Command, Ended, NodeState, Output, ProcessState, SignalName
from insitu.cluster.engines.gpu_leases import GpuLeases
from insitu.cluster.engines.standby import Standby, StandbyPool, start_process
from insitu.cluster.engines.task_files import TaskFiles
from insitu.cluster.task import PARENT_ENV

HOST = "127.0.0.1"
_CHUNK = 64 * 1024
_SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL}
_TO_TASK_ALONE = {"dump": signal.SIGUSR1, "suspend": signal.SIGSTOP, "continue": signal.SIGCONT}


class _Running:
    """One task's process, the descriptor that becomes readable when it ends, and its output."""

    def __init__(self, task: TaskId, process: subprocess.Popen[bytes]) -> None:
        self.task = task
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        if process.stdout is None:
            raise ClusterError(
                f"{task} was started without a pipe for its output. Please report this: it is a bug of insitu"
            )
        self.pipe = process.stdout
        os.set_blocking(self.pipe.fileno(), False)

    def read(self) -> bytes | None:
        """Return the output that is ready; b"" at the end of the stream, None if nothing is ready."""
        try:
            return os.read(self.pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return None

    def kill_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class LocalEngine(TaskFiles):
    """Runs the tasks of one job. `wake` makes `wait` return when it becomes readable; its owner reads it.

    With `reap_orphans` it also reaps children of this process that it didn't start: processes that tasks
    left behind, where this process adopts orphans. Children of this process's own session are left alone.
    Tasks listen at `host`, a numeric address of this machine.
    """

    def __init__(
        self, job: JobPaths, wake: int | None = None, *, reap_orphans: bool = False, host: str = HOST
    ) -> None:
        super().__init__(job)
        self._paths = Paths(job.root.parent.parent)
        self._reaps_orphans = reap_orphans
        self._selector = selectors.DefaultSelector()
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ, None)
        self._running: dict[TaskId, _Running] = {}
        self._listeners = TaskListeners(host)
        self._gpus = GpuLeases()
        self._standbys = StandbyPool(self._selector, job.code)

    def keep_standby(self, count: int, command: Command) -> None:
        self._standbys.keep(count, _tied_to_this_process(command))

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        return self._listeners.reserve([spec.task for spec in tasks], self._running)

    def launch(self, task: TaskSpec, command: Command) -> int:
        listener = self._listeners.take(task.task)
        command = self._gpus.equip(task.task, _tied_to_this_process(command))
        process = self._standbys.activate(command, listener)
        if process is None:
            inherit = () if listener is None else (listener.fileno(),)
            try:
                process = start_process(with_listener(command, listener), self._job.code, inherit=inherit)
            except OSError as error:
                self._gpus.give_back(task.task)
                raise ClusterError(
                    f"Can't start {task.task}: {error}. Check the memory and the number of processes "
                    "that this user may have (ulimit -u)"
                ) from error
        running = _Running(task.task, process)
        self._running[task.task] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ, running)
        self._selector.register(running.pipe, selectors.EVENT_READ, running)
        return process.pid

    def signal(self, task: TaskId, name: SignalName) -> None:
        running = self._running.get(task)
        if running is None:
            return
        if name in _TO_TASK_ALONE:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(running.pidfd, _TO_TASK_ALONE[name])
            return
        running.kill_group(_SIGNALS[name])
        if name == "term":
            running.kill_group(signal.SIGCONT)

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        if self._reaps_orphans:
            # Before the wait: one that ends from now on makes `wake` readable.
            self._reap_orphans()
        ready = self._selector.select(None if timeout is None else max(0.0, timeout))
        happened: list[Output | Ended] = []
        ended: list[_Running] = []
        for key, _ in ready:
            running = key.data
            if running is None:
                continue
            if isinstance(running, Standby):
                self._standbys.handle_output(running)
                continue
            if key.fd == running.pidfd:
                ended.append(running)
            else:
                happened += self._read(running)
        codes = [(running, *self._reap(running)) for running in ended]
        for running, output, _ in codes:
            happened += [Output(running.task, data) for data in output]
        # Those that a signal ended come first: those after them may only have lost a peer.
        codes.sort(key=lambda item: item[2] >= 0)
        return [*happened, *(Ended(running.task, code) for running, _, code in codes)]

    def _read(self, running: _Running) -> list[Output]:
        data = running.read()
        if data == b"":
            self._selector.unregister(running.pipe)
        return [Output(running.task, data)] if data else []

    def _reap(self, running: _Running) -> tuple[list[bytes], int]:
        """Return (the rest of its output, its exit code). Kill its group while its number is still taken."""
        os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED | os.WNOWAIT)
        running.kill_group(signal.SIGKILL)
        output = []
        # All that the task wrote is in the pipe. What comes beyond is of a process that has left its group.
        room = fcntl.fcntl(running.pipe, fcntl.F_GETPIPE_SZ)
        while room > 0 and (data := running.read()):
            output.append(data)
            room -= len(data)
        code = running.process.wait()
        self._forget(running)
        return output, code

    def _forget(self, running: _Running) -> None:
        self._selector.unregister(running.pidfd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(running.pipe)
        os.close(running.pidfd)
        running.pipe.close()
        del self._running[running.task]
        self._gpus.give_back(running.task)
        self._listeners.stop_listening(running.task)

    def _reap_orphans(self) -> None:
        own = {*(r.process.pid for r in self._running.values()), *self._standbys.pids}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid in own or os.getsid(found.si_pid) == os.getsid(0):
                    return
                os.waitpid(found.si_pid, 0)
            except (ChildProcessError, ProcessLookupError):
                return

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        pids = {task: self._running[task].process.pid for task in tasks if task in self._running}
        used = read_cpu_seconds(pids.values())
        return {
            task: ProcessState(is_stopped(pid), read_resident_bytes(pid), used[pid])
            for task, pid in pids.items()
        }

    def node_states(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeState]:
        available = read_available_bytes()
        have_stores = not is_missing(self._paths.nodes)
        return {
            n: NodeState(available, not have_stores or not is_missing(self._paths.node(n))) for n in nodes
        }

    def close(self) -> None:
        for running in list(self._running.values()):
            running.kill_group(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(END_TIMEOUT)
            self._forget(running)
        self._gpus.close()
        self._standbys.close()
        self._listeners.close()
        self._selector.close()


def _tied_to_this_process(command: Command) -> Command:
    """Return `command`, whose process then ends with this one."""
    return replace(command, environment={**command.environment, PARENT_ENV: str(os.getpid())})


# The sockets on which the tasks of a job listen: bound when an address is chosen, and handed down


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
