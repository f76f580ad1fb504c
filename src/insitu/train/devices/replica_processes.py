"""Further replicas of this script: processes that run it from its start, each for one device.

For backends that don't compute on several devices of one process at the same time. The process that the user
started is replica 0; the others end with it, are silent, and meet it through the exchange.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
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
from insitu.ports import hold_port
from insitu.spec import TaskId
from insitu.train.devices.names import Device

_HOST = "127.0.0.1"
_SETTLE = 10.0
"""Seconds that a process which has lost another, or ends, gives that one to end."""
_LAST_LINES = 20

_companions: Companions | None = None


class Companions:
    """The processes of the replicas from 1 on. Made by replica 0, once in a process."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        held = [hold_port(_HOST) for _ in devices]
        self.addresses = tuple(f"{_HOST}:{port.getsockname()[1]}" for port in held)
        self.secret = secrets.token_bytes(32)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._outputs: dict[int, IO[bytes]] = {}
        self._pipes: list[int] = []
        for port in held:
            port.close()
        atexit.register(self._end)
        try:
            for number in range(1, len(devices)):
                self._start(number)
        except OSError as error:
            self._end()
            raise TrainingError(f"A process for {devices[number]} can't be started: {error}") from error

    def _start(self, number: int) -> None:
        end, own = os.pipe()
        self._pipes.append(own)
        output = self._outputs[number] = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as it runs
        environment = {TASK_ENV: f"worker:{number}", PARENT_PIPE_ENV: f"{end}:{os.getpid()}"}
        try:
            self._processes[number] = subprocess.Popen(
                _command(),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[end],
            )
        finally:
            os.close(end)
        os.write(own, ReplicaConfig(number, self.devices, self.addresses, self.secret).to_line())

    def check(self, wait: float = 0.0) -> None:
        """Raises TrainingError where a replica has ended, with its last lines. Gives it `wait` seconds."""
        deadline = time.monotonic() + wait
        while True:
            for number, process in self._processes.items():
                if process.poll() is not None:
                    raise TrainingError(self._account(number, process.returncode))
            if time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def _account(self, number: int, code: int) -> str:
        output = self._outputs[number]
        output.seek(0)
        lines = output.read().decode(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        said = "\n  ".join(["Its last lines:", *lines]) if lines else "It said nothing."
        return (
            f"The replica on {self.devices[number]}, a process that runs this script too, {how} before "
            f"training was over. {said}"
        )

    def _end(self) -> None:
        """Ends all of them: each does so by itself when its pipe closes."""
        for pipe in self._pipes:
            os.close(pipe)
        deadline = time.monotonic() + _SETTLE
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._pipes.clear()
        self._processes.clear()


class Watch:
    """What a membership asks while it waits for others, and when it has lost one."""

    def while_waiting(self) -> None:
        """Raises TrainingError where a replica that this process started has ended."""
        if _companions is not None:
            _companions.check()

    def after_loss(self) -> None:
        """As `while_waiting`, of one whose end may not have been seen yet."""
        if _companions is not None:
            _companions.check(_SETTLE)


def can_start() -> bool:
    """Whether this process runs a script that others can run too: not a prompt, a notebook, `-c`, nor a
    worker of multiprocessing."""
    main = sys.modules.get("__main__")
    return bool(getattr(main, "__file__", None)) and "-c" not in sys.orig_argv[1:] and not parent_process()


def one_of(devices: Sequence[Device], context: Context) -> tuple[Device, Context]:
    """This process's device, and who it is among the replicas on `devices`; the first time, replica 0 starts
    the others. Raises TrainingError for other devices than before."""
    global _companions
    names = tuple(device.name for device in devices)
    told = get_replica_config()
    if told is not None:
        _check_same(names, told.devices)
    else:
        if _companions is None:
            _companions = Companions(names)
        _check_same(names, _companions.devices)
        told = ReplicaConfig(0, names, _companions.addresses, _companions.secret)
    if devices[0].kind == "cpu":
        _share_cores(len(devices))
    here = replace(
        context.split_over(len(devices)),
        shards=(told.replica,),
        task=TaskId("worker", told.replica),
        workers=told.addresses,
        shared_secret=told.secret,
    )
    return devices[told.replica], here


def _check_same(names: tuple[str, ...], before: tuple[str, ...]) -> None:
    if names != before:
        raise TrainingError(
            f"The processes of a script have been started for the devices {', '.join(before)}, once for all. "
            f"Received: a strategy over {', '.join(names)}. Use one strategy, or two scripts."
        )


def _share_cores(replicas: int) -> None:
    """Each replica computes with its part of the cores, unless it was said how many threads to take."""
    if config.settings().threads is None and not os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // replicas))


def _command() -> list[str]:
    """This process's own command. The script's path is absolute: this process may have moved since."""
    command = [sys.executable, *sys.orig_argv[1:]]
    file = Path(sys.modules["__main__"].__file__ or "")
    if sys.modules["__main__"].__spec__ is None:
        for index, argument in enumerate(command[1:], 1):
            if Path(argument).name == file.name:
                command[index] = str(file.absolute())
                break
    return command
