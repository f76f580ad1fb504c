"""The local engine: every node is this machine, every task a process of its own session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from insitu.cluster.engines.engine import Command, Ended, NodeState, Output, ProcessState, SignalName
from insitu.cluster.engines.gpu_leases import GpuLeases
from insitu.cluster.engines.listeners import TaskListeners, with_listener
from insitu.cluster.engines.standby import Standby, StandbyPool, start_process
from insitu.cluster.engines.task_files import TaskFiles
from insitu.cluster.task import PARENT_ENV
from insitu.durable import is_missing
from insitu.errors import ClusterError
from insitu.paths import JobPaths, Paths
from insitu.processes import (
    END_TIMEOUT,
    is_stopped,
    read_available_bytes,
    read_cpu_seconds,
    read_resident_bytes,
)
from insitu.spec import NodeId, TaskId, TaskSpec

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
        """Return the output that is ready; b"" at the end of the stream, None where nothing is ready."""
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
