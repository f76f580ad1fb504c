"""A backend is set up once, as asked, or what it can't do is refused. Backends with GPUs are played here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.config import DeviceSettings
from insitu.base.errors import InputError
from insitu.train.backends import load_backend
from insitu.train.backends.jax import devices as jax_devices
from insitu.train.devices import setup


@pytest.fixture(autouse=True)
def nothing_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_applied", {})
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NPROC"):
        monkeypatch.setenv(name, "")  # undone at the end, whatever a setup writes there


class TensorFlow:
    """The part of TensorFlow's configuration that is used, with so many GPUs."""

    def __init__(self, gpus: int, *, started: bool = False) -> None:
        self.gpus, self.started = [f"GPU:{i}" for i in range(gpus)], started
        self.calls: list[Any] = []
        threading = SimpleNamespace(
            set_intra_op_parallelism_threads=lambda count: self._call("within", count),
            set_inter_op_parallelism_threads=lambda count: self._call("beside", count),
        )
        self.config = SimpleNamespace(
            LogicalDeviceConfiguration=lambda memory_limit=None: memory_limit,
            list_physical_devices=lambda kind: self.gpus if kind == "GPU" else ["CPU:0"],
            list_logical_devices=lambda: [SimpleNamespace(name="/device:CPU:0")],
            set_logical_device_configuration=lambda *given: self._call("logical", *given),
            set_soft_device_placement=lambda value: self.calls.append(("soft", value)),
            experimental=SimpleNamespace(set_memory_growth=lambda *given: self._call("growth", *given)),
            threading=threading,
        )
        self.debugging = SimpleNamespace(set_log_device_placement=lambda value: self._call("log", value))

    def _call(self, *given: Any) -> None:
        if self.started:
            raise RuntimeError("already initialized")
        self.calls.append(given)


@pytest.mark.parametrize(
    ("gpus", "settings", "calls"),
    [
        (0, {"virtual_devices": ("cpu", 2)}, [("logical", "CPU:0", [None, None])]),
        (
            2,
            {"virtual_devices": ("gpu", 2), "memory_limit": 64},
            [("logical", "GPU:0", [64, 64]), ("logical", "GPU:1", [64])],
        ),
        (1, {"virtual_devices": ("gpu", 2), "memory_limit": 64}, [("logical", "GPU:0", [64, 64])]),
        (1, {"memory_limit": 64, "memory_growth": True}, [("logical", "GPU:0", [64])]),
        (2, {"memory_growth": False}, [("growth", "GPU:0", False), ("growth", "GPU:1", False)]),
        (0, {"threads": (3, None)}, [("within", 3)]),
        (0, {"threads": (3, 2)}, [("within", 3), ("beside", 2)]),
        (0, {"soft_placement": True, "log_placement": True}, [("soft", True), ("log", True)]),
    ],
)
def test_what_tensorflow_is_told(
    monkeypatch: pytest.MonkeyPatch, gpus: int, settings: Any, calls: list[Any]
) -> None:
    tensorflow = TensorFlow(gpus)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)  # type: ignore[arg-type]
    setup.apply_settings("tensorflow", DeviceSettings(**settings))
    assert tensorflow.calls == calls


def test_the_same_settings_are_applied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorflow = TensorFlow(0)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)  # type: ignore[arg-type]
    for threads in (2, 2, 3):
        setup.apply_settings("tensorflow", DeviceSettings(threads=(threads, None)))
    assert tensorflow.calls == [("within", 2), ("within", 3)]


def test_a_backend_that_has_started_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow(0, started=True))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"before TensorFlow starts\. Received: .*with cpu:0\. Call insitu"):
        setup.apply_settings("tensorflow", DeviceSettings(threads=(2, None)))


def test_virtual_gpus_need_a_gpu_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, message in ((0, "A GPU is needed for virtual GPUs"), (1, "need a memory limit for each")):
        monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow(gpus))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=message):
            setup.apply_settings("tensorflow", DeviceSettings(virtual_devices=("gpu", 2)))


def test_a_limit_without_a_gpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow(0))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="a memory limit has no effect"):
        setup.apply_settings("tensorflow", DeviceSettings(memory_limit=64))


class Jax:
    """JAX with so many CPU devices once it has started."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.updates: list[Any] = []
        self.config = SimpleNamespace(update=lambda *given: self.updates.append(given))

    def devices(self, kind: str) -> list[str]:
        return [kind] * self.count

    def local_device_count(self) -> int:
        return self.count


@pytest.fixture(params=[False, True])
def jax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Jax, bool]]:
    """(JAX, whether it has started)."""
    played = Jax(2)
    monkeypatch.setitem(sys.modules, "jax", played)  # type: ignore[arg-type]
    monkeypatch.setattr(type(load_backend("jax")), "has_started", lambda backend: request.param)
    yield played, request.param


def test_jax_gets_its_number_of_devices_before_it_starts(jax: tuple[Jax, bool]) -> None:
    played, started = jax
    setup.apply_settings("jax", DeviceSettings(virtual_devices=("cpu", 2)))
    assert played.updates == ([] if started else [("jax_num_cpu_devices", 2)])
    if started:
        with pytest.raises(InputError, match="Received: cpu:3 after a start with 2 CPU devices"):
            setup.apply_settings("jax", DeviceSettings(virtual_devices=("cpu", 3)))


def test_memory_and_threads_of_jax_are_in_its_environment(
    jax: tuple[Jax, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_devices, "_read_gpu_mebibytes", lambda: 400)
    settings = DeviceSettings(memory_growth=True, memory_limit=100, threads=(3, None), log_placement=True)
    if jax[1]:
        with pytest.raises(InputError, match=r"Memory and threads must be set before JAX starts"):
            setup.apply_settings("jax", settings)
        return
    setup.apply_settings("jax", settings)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2500"
    assert os.environ["NPROC"] == "3"
    assert jax[0].updates == [("jax_log_compiles", True)]


def test_jax_divides_no_gpu(jax: tuple[Jax, bool]) -> None:
    with pytest.raises(InputError, match=r"out of a CPU only\. Received: gpu:2"):
        setup.apply_settings("jax", DeviceSettings(virtual_devices=("gpu", 2)))


@pytest.mark.parametrize("answer", ["81559\n81559\n", "", "N/A\n", OSError("not found")])
def test_the_memory_of_the_first_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def run(*given: Any, **options: Any) -> Any:
        if isinstance(answer, OSError):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    if answer == "81559\n81559\n":
        assert jax_devices._read_gpu_mebibytes() == 81559
    else:
        with pytest.warns(UserWarning, match="There is no GPU"):
            assert jax_devices._read_gpu_mebibytes() is None


class Torch:
    """PyTorch with so many GPUs of 1 GiB."""

    def __init__(self, gpus: int = 0) -> None:
        self.calls: list[Any] = []
        self.cuda = SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            get_device_properties=lambda index: SimpleNamespace(total_memory=2**30),
            set_per_process_memory_fraction=lambda *given: self.calls.append(("fraction", *given)),
        )

    def set_num_threads(self, count: int) -> None:
        self.calls.append(("within", count))

    def get_num_interop_threads(self) -> int:
        return 4

    def set_num_interop_threads(self, count: int) -> None:
        raise RuntimeError("parallel work has started")


def test_what_pytorch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(2)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    setup.apply_settings("torch", DeviceSettings(memory_limit=256, threads=(3, 4)))
    assert torch.calls == [("fraction", 0.25, 0), ("fraction", 0.25, 1), ("within", 3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"virtual_devices": ("gpu", 2)}, "PyTorch can't divide a GPU"),
        ({"memory_growth": False}, "always takes memory as it needs it"),
        ({"threads": (3, 2)}, "Threads must be set before PyTorch starts"),
    ],
)
def test_what_pytorch_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        setup.apply_settings("torch", DeviceSettings(**settings))
