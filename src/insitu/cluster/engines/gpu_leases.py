"""Gives the tasks of this machine GPUs, each to one task at a time, whichever job or home that is of.

A lease is a lock on what the driver says about the device, so the system ends it with the process that runs
the task, however that ends. Devices are numbered by their PCI addresses, as `nvidia-smi` does.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from insitu.base.context import GPU_NUMBERS_ENV, GPUS_ENV
from insitu.base.errors import ClusterError
from insitu.base.spec import TaskId
from insitu.base.wording import format_count
from insitu.cluster.engines.engine import Command

VISIBLE_ENV, ORDER_ENV = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_NONE = "-1"
"""The value of CUDA_VISIBLE_DEVICES with which a task sees no GPU."""
_DRIVER = Path("/proc/driver/nvidia/gpus")


def list_devices(environment: Mapping[str, str], driver: Path | None = None) -> dict[int, Path]:
    """Return the GPUs of this machine that a process with this environment may use, by number, with a file
    of each.

    Devices that CUDA_VISIBLE_DEVICES names in another way than by number, such as parts of one, are left out.
    """
    folder = _DRIVER if driver is None else driver
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    devices = {number: path / "information" for number, path in enumerate(found)}
    visible = environment.get(VISIBLE_ENV)
    if visible is None:
        return devices
    chosen: dict[int, Path] = {}
    for word in visible.split(","):
        if not word.strip().isdecimal() or int(word) not in devices:
            break  # as CUDA does
        chosen[int(word)] = devices[int(word)]
    return chosen


class GpuLeases:
    """The GPUs that the tasks of one engine have. Not for several threads."""

    def __init__(self) -> None:
        self._held: dict[TaskId, list[int]] = {}

    def equip(self, task: TaskId, command: Command) -> Command:
        """Return the command of a task with the GPUs that it asks for, which it has until `give_back`.

        Raises ClusterError if there aren't so many that nobody has.
        """
        asked = command.environment.get(GPUS_ENV, "")
        if not asked:
            return command
        self.give_back(task)
        numbers = self._take(task, int(asked), command.environment.get(GPU_NUMBERS_ENV))
        visible = ",".join(map(str, numbers)) or _NONE
        given = {VISIBLE_ENV: visible, ORDER_ENV: "PCI_BUS_ID"}
        return replace(command, environment={**command.environment, **given})

    def _take(self, task: TaskId, count: int, among: str | None) -> list[int]:
        """Lock so many devices out of those that are named; None: out of all."""
        taken: list[int] = []
        numbers: list[int] = []
        devices = list_devices(os.environ) if count else {}
        if among is not None:
            devices = {n: path for n, path in devices.items() if str(n) in among.split(",")}
        for number, path in devices.items():
            if len(numbers) == count:
                break
            descriptor = lock_device(path)
            if descriptor is not None:
                taken.append(descriptor)
                numbers.append(number)
        if len(numbers) < count:
            _release(taken)
            raise ClusterError(
                f"{task} needs {format_count(count, 'GPU')} that no other task has. Received: "
                f"{len(numbers)} of the "
                f"{len(devices)} that may be used here. Wait until other jobs have ended (`insitu ps`), or "
                f"start with fewer --workers or --gpus-per-worker"
            )
        self._held[task] = taken
        return numbers

    def give_back(self, task: TaskId) -> None:
        """Let others have the GPUs of a task that has ended."""
        _release(self._held.pop(task, []))

    def close(self) -> None:
        """Give all back."""
        for task in list(self._held):
            self.give_back(task)


def lock_device(path: Path) -> int | None:
    """Return a descriptor that holds the lease of a device, or None where another process has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _release(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked from this one may have the descriptor, too
        os.close(descriptor)


def count_free_gpus() -> tuple[int, int]:
    """Return how many GPUs of this machine no task has, and how many there are."""
    devices = list_devices(os.environ)
    held = [lock_device(path) for path in devices.values()]
    free = [descriptor for descriptor in held if descriptor is not None]
    _release(free)
    return len(free), len(devices)
