"""Start further replicas of this script: processes that run it from its start, each for one device.

This serves backends that can't compute on several devices of one process at the same time. The process that
the user started is replica 0. The others write to temporary files, meet replica 0 through the exchange, and
end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from typing import IO

from insitu import config
from insitu.context import TASK_ENV, Context
from insitu.errors import TrainingError
from insitu.parent_death import PARENT_PIPE_ENV, ReplicaConfig, get_replica_config
from insitu.ports import LISTENER_ENV, adopt_listener, describe_listener, hold_port
from insitu.spec import TaskId
from insitu.train.devices.names import Device

_HOST = "127.0.0.1"
_EXIT_TIMEOUT = 10.0
"""Seconds that replica 0 waits for the others to exit, when it exits or has lost one."""
_OUTPUT_LINES = 20
_ADVICE = (
    " Call fit, evaluate and predict in all processes; `if insitu.context().is_chief:` is for writing files."
)
"""For a replica whose script has ended well, while this one's goes on."""

_replica_processes: ReplicaProcesses | None = None


class ReplicaProcesses:
    """The processes of the replicas from 1 on. Replica 0 starts them, once in a process."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        held = [hold_port(_HOST) for _ in devices]
        self.addresses = tuple(f"{_HOST}:{port.getsockname()[1]}" for port in held)
        self.secret = secrets.token_bytes(32)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._outputs: dict[int, IO[bytes]] = {}
        self._pipes: list[int] = []
        atexit.register(self._end)
        adopt_listener(held[0].detach(), self.addresses[0])
        try:
            for replica in range(1, len(devices)):
                self._start(replica, held[replica])
        except OSError as error:
            self._end()
            raise TrainingError(f"A process for {devices[replica]} can't be started: {error}") from error
        finally:
            for port in held[1:]:
                port.close()

    def _start(self, replica: int, listener: socket.socket) -> None:
        end, own = os.pipe()
        self._pipes.append(own)
        output = self._outputs[replica] = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as it runs
        environment = {
            TASK_ENV: f"worker:{replica}",
            PARENT_PIPE_ENV: f"{end}:{os.getpid()}",
            LISTENER_ENV: describe_listener(listener),
        }
        try:
            self._processes[replica] = subprocess.Popen(
                _command(),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[end, listener.fileno()],
            )
        finally:
            os.close(end)
        os.write(own, ReplicaConfig(replica, self.devices, self.addresses, self.secret).to_line())

    def check(self, wait: float = 0.0) -> None:
        """Raise TrainingError where a replica has ended, with the last lines of its output. Waits `wait`
        seconds for that."""
        deadline = time.monotonic() + wait
        while True:
            for replica, process in self._processes.items():
                if process.poll() is not None:
                    raise TrainingError(self._describe_exit(replica, process.returncode))
            if time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def _describe_exit(self, replica: int, code: int) -> str:
        output = self._outputs[replica]
        output.seek(0)
        lines = output.read().decode(errors="replace").rstrip().splitlines()[-_OUTPUT_LINES:]
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        output_text = "\n  ".join(["Its last lines:", *lines]) if lines else "It wrote nothing."
        return (
            f"The replica on {self.devices[replica]}, a process that runs this script too, {how} before "
            f"training was over. {output_text}{_ADVICE if code == 0 else ''}"
        )

    def _end(self) -> None:
        """Close the pipes, which ends the processes, and wait for them."""
        for pipe in self._pipes:
            os.close(pipe)
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for output in self._outputs.values():
            output.close()
        self._pipes.clear()
        self._processes.clear()
        self._outputs.clear()


class ReplicaMonitor:
    """Checks on the replicas' processes, for a membership that waits for others or has lost one."""

    def check(self) -> None:
        """Raise TrainingError where a replica that this process started has ended."""
        if _replica_processes is not None:
            _replica_processes.check()

    def check_after_loss(self) -> None:
        """Check, and give a replica that is about to end the time to do so."""
        if _replica_processes is not None:
            _replica_processes.check(_EXIT_TIMEOUT)


def can_start_replicas() -> bool:
    """Return True if this process runs a script that other processes can run too: not a prompt, a notebook,
    `-c`, nor a worker of multiprocessing."""
    main = sys.modules.get("__main__")
    return bool(getattr(main, "__file__", None)) and "-c" not in sys.orig_argv[1:] and not parent_process()


def join_replicas(devices: Sequence[Device], context: Context) -> tuple[Device, Context]:
    """Return this process's device, and its context among the replicas on `devices`. The first call in
    replica 0 starts the others. Raises TrainingError for other devices than before."""
    global _replica_processes
    names = tuple(device.name for device in devices)
    identity = get_replica_config()
    if identity is not None:
        _check_same(names, identity.devices)
    else:
        if _replica_processes is None:
            _replica_processes = ReplicaProcesses(names)
        _check_same(names, _replica_processes.devices)
        identity = ReplicaConfig(0, names, _replica_processes.addresses, _replica_processes.secret)
    if devices[0].kind == "cpu":
        _divide_cores(len(devices))
    here = replace(
        context.split_over(len(devices)),
        shards=(identity.replica,),
        task=TaskId("worker", identity.replica),
        workers=identity.addresses,
        shared_secret=identity.secret,
    )
    return devices[identity.replica], here


def _check_same(names: tuple[str, ...], before: tuple[str, ...]) -> None:
    if names != before:
        raise TrainingError(
            f"The processes of a script have been started for the devices {', '.join(before)}, once for all. "
            f"Received: a strategy over {', '.join(names)}. Use one strategy, or two scripts."
        )


def _divide_cores(replicas: int) -> None:
    """Give each replica an equal part of the cores, unless the number of threads is set."""
    if config.settings().threads is None and not os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // replicas))


def _command() -> list[str]:
    """Return this process's own command. The script's path is absolute: this process may have changed its
    directory since."""
    command = [sys.executable, *sys.orig_argv[1:]]
    file = Path(sys.modules["__main__"].__file__ or "")
    if sys.modules["__main__"].__spec__ is None:
        for index, argument in enumerate(command[1:], 1):
            if Path(argument).name == file.name:
                command[index] = str(file.absolute())
                break
    return command
