"""Devices of PyTorch, and their settings."""

from __future__ import annotations

import warnings
from typing import Any

from insitu.base import config
from insitu.base.config import DeviceSettings
from insitu.base.errors import InputError
from insitu.train.devices import Device, already_started_error, print_line

_modes: list[Any] = []
"""Keeps what logs operations."""


def list_devices() -> list[Device]:
    import torch

    virtual = config.settings().virtual_devices
    count = virtual[1] if virtual is not None and virtual[0] == "cpu" else 1
    devices = [Device(f"cpu:{i}", "cpu", i, "torch", "cpu", virtual=count > 1) for i in range(count)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        facts = {"model": properties.name, "memory": properties.total_memory}
        devices.append(Device(f"gpu:{index}", "gpu", index, "torch", f"cuda:{index}", **facts))
    if torch.backends.mps.is_available():
        devices.append(Device("gpu:0", "gpu", 0, "torch", "mps:0", model="Apple"))
    return devices


def set_up(settings: DeviceSettings) -> None:
    import torch

    if settings.virtual_devices is not None and settings.virtual_devices[0] == "gpu":
        raise InputError(
            "PyTorch can't divide a GPU. Received: gpu:"
            f"{settings.virtual_devices[1]}. Use TensorFlow, or fewer devices."
        )
    if settings.memory_growth is False:
        raise InputError(
            "PyTorch always takes memory as it needs it. Received: memory growth False. Leave it out."
        )
    if settings.memory_limit is not None:
        if not torch.cuda.is_available():
            warnings.warn("There is no GPU: a memory limit has no effect.", stacklevel=2)
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory_limit * 2**20 / total), index)
    if settings.log_placement and not _modes:
        _modes.append(log_operations())
    if settings.threads is not None:
        within, beside = settings.threads
        torch.set_num_threads(within)
        if beside is not None and torch.get_num_interop_threads() != beside:
            try:
                torch.set_num_interop_threads(beside)
            except RuntimeError as error:
                found = f"{torch.get_num_interop_threads()} parallel operations"
                raise already_started_error("PyTorch", "Threads", beside, found) from error


def log_operations() -> Any:
    """Print each operation that PyTorch runs from now on, once for each device. Returns the object that does
    so."""
    from torch.utils._python_dispatch import TorchDispatchMode

    logged: set[tuple[str, str]] = set()

    class Placements(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            device = str(getattr(result, "device", "cpu"))
            if (str(function), device) not in logged:
                logged.add((str(function), device))
                print_line(f"operation {function}: {device}")
            return result

    mode = Placements()
    mode.__enter__()
    return mode
