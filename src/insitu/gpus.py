"""What the GPUs of this process do, by NVIDIA's management library where it is installed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

_DRIVER = Path("/proc/driver/nvidia")
"""Made by the driver."""


class GpuReader:
    """Reads how busy the GPUs are that this process may use. Without GPUs, or without `nvidia-ml-py`, there
    are none."""

    def __init__(self) -> None:
        #: The library; None until the first look, and where there is none.
        self._library: Any = None
        #: The number of each device and the library's handle of it; None until the first look.
        self._devices: list[tuple[int, Any]] | None = None

    def read(self) -> list[dict[str, float]]:
        """Return for each device its number, utilization in [0, 1], and bytes of memory used and in all."""
        if self._devices is None:
            self._devices = self._find() if _DRIVER.exists() else []
        found = []
        for index, handle in self._devices:
            try:
                rates = self._library.nvmlDeviceGetUtilizationRates(handle)
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
            except self._library.NVMLError:
                continue
            found.append(
                {
                    "index": index,
                    "utilization": rates.gpu / 100,
                    "memory": int(memory.used),
                    "memory_total": int(memory.total),
                }
            )
        return found

    def _find(self) -> list[tuple[int, Any]]:
        try:
            self._library = importlib.import_module("pynvml")
        except ImportError:
            return []
        try:
            self._library.nvmlInit()
            count = self._library.nvmlDeviceGetCount()
            return [(index, self._library.nvmlDeviceGetHandleByIndex(index)) for index in _choose(count)]
        except self._library.NVMLError:
            return []


def _choose(count: int) -> list[int]:
    """Return the numbers of the devices that this process may use, out of `count`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    names = [name.strip() for name in visible.split(",")]
    # Where devices are named by their identities, the numbers aren't known: those that are, are shown.
    return [int(name) for name in names if name.isdecimal() and int(name) < count]
