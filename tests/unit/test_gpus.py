"""GPUs are read by NVIDIA's library where that is there, and nothing fails where it isn't."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.train.elastic import progress_reporter
from insitu.train.elastic.progress_reporter import GpuReader


class Nvml:
    """Stands for the library, with two devices, of which the second is lost after a look."""

    NVMLError = OSError

    def __init__(self) -> None:
        self.lost = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.lost and handle == 1:
            raise self.NVMLError("lost")
        return SimpleNamespace(gpu=50 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=1 << 20, total=1 << 30)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nvml:
    made = Nvml()
    monkeypatch.setattr(progress_reporter, "_DRIVER", tmp_path)
    monkeypatch.setattr(importlib, "import_module", lambda name: made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def test_each_device_is_read(library: Nvml) -> None:
    reader = GpuReader()
    assert [gpu["utilization"] for gpu in reader.read()] == [0.5, 0.51]
    library.lost = True
    assert reader.read() == [{"index": 0, "utilization": 0.5, "memory": 1 << 20, "memory_total": 1 << 30}]


@pytest.mark.parametrize(("visible", "expected"), [("1", [1]), ("", []), ("1,0", [1, 0]), ("GPU-1a,7", [])])
def test_a_process_sees_the_devices_that_it_may_use(
    library: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["index"] for gpu in GpuReader().read()] == expected


def test_without_a_driver_or_the_library_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(progress_reporter, "_DRIVER", tmp_path / "none")
    assert GpuReader().read() == []
    monkeypatch.setattr(progress_reporter, "_DRIVER", tmp_path)
    assert GpuReader().read() == []
