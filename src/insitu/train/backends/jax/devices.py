"""Devices of JAX, and their settings."""

from __future__ import annotations

import os
import subprocess
import warnings
from typing import Any

from insitu.base.config import DeviceSettings
from insitu.base.errors import InputError
from insitu.train.backends import load_backend
from insitu.train.devices import Device, already_started_error


def list_devices() -> list[Device]:
    import jax

    devices = []
    for kind in ("cpu", "gpu", "tpu"):
        try:
            found = jax.local_devices(backend=kind)
        except RuntimeError:
            continue  # this build or this machine has none of the kind
        for index, device in enumerate(found):
            facts: dict[str, Any] = {"virtual": len(found) > 1}
            if kind != "cpu":
                memory = (device.memory_stats() or {}).get("bytes_limit")
                facts = {"model": device.device_kind, "memory": memory}
            devices.append(Device(f"{kind}:{index}", kind, index, "jax", str(device), **facts))
    return devices


def find_handle(device: Device) -> Any:
    """See `Backend.device_handle`."""
    import jax

    return jax.local_devices(backend=device.kind)[device.index]


def set_up(settings: DeviceSettings) -> None:
    import jax

    virtual = settings.virtual_devices
    if virtual is not None and virtual[0] == "gpu":
        raise InputError(
            "JAX makes several devices out of a CPU only. Received: gpu:"
            f"{virtual[1]}. Use cpu:N, or TensorFlow."
        )
    if virtual is not None:
        _set_jax_cpu_count(jax, virtual[1])
    if settings.log_placement is not None:
        jax.config.update("jax_log_compiles", settings.log_placement)
    memory = {}
    if settings.memory_growth is not None:
        memory["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(not settings.memory_growth).lower()
    if settings.memory_limit is not None and (total := _read_gpu_mebibytes()):
        memory["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(1.0, settings.memory_limit / total):.4f}"
    if settings.threads is not None:
        memory["NPROC"] = str(settings.threads[0])
    if any(os.environ.get(name) != value for name, value in memory.items()):
        if load_backend("jax").has_started():
            found = f"{jax.local_device_count()} devices"
            raise already_started_error("JAX", "Memory and threads", memory, found)
        os.environ.update(memory)


def _set_jax_cpu_count(jax: Any, count: int) -> None:
    if load_backend("jax").has_started():
        found = len(jax.devices("cpu"))
        if found != count:
            raise already_started_error("JAX", "Virtual devices", f"cpu:{count}", f"{found} CPU devices")
        return
    jax.config.update("jax_num_cpu_devices", count)


def _read_gpu_mebibytes() -> int | None:
    """Return the memory of the first GPU, of which JAX takes a limit as a fraction; None if there is no
    GPU."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return int(answer.stdout.splitlines()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        warnings.warn("There is no GPU: a memory limit has no effect.", stacklevel=2)
        return None
