"""Configure a backend's devices as `insitu.base.config` says, before the backend starts."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from insitu.base import config
from insitu.base.config import DeviceSettings
from insitu.base.errors import InputError

_applied: dict[str, DeviceSettings] = {}
_torch_modes: list[Any] = []
"""Keeps what logs operations of PyTorch."""


def apply_settings(backend: str, settings: DeviceSettings) -> None:
    """Set up `backend`, which is imported. Raises InputError if it has started with other settings, or can't
    apply these."""
    if _applied.get(backend) == settings:
        return
    {"tensorflow": _set_up_tensorflow, "jax": _set_up_jax, "torch": _set_up_torch}[backend](settings)
    _applied[backend] = settings


def already_started_error(backend: str, what: str, requested: Any, found: Any) -> InputError:
    return InputError(
        f"{what} must be set before {backend} starts. Received: {requested} after a start with {found}. "
        "Call insitu.config at the top of the script, or give the option to `insitu start`."
    )


# TensorFlow


def _set_up_tensorflow(settings: DeviceSettings) -> None:
    import tensorflow as tf

    try:
        _configure_tensorflow_devices(tf, settings)
        if settings.threads is not None:
            within, beside = settings.threads
            tf.config.threading.set_intra_op_parallelism_threads(within)
            if beside is not None:
                tf.config.threading.set_inter_op_parallelism_threads(beside)
    except RuntimeError as error:
        found = ", ".join(_short(d.name) for d in tf.config.list_logical_devices())
        requested = settings.to_environment()
        raise already_started_error("TensorFlow", "Devices, memory and threads", requested, found) from error
    if settings.soft_placement is not None:
        tf.config.set_soft_device_placement(settings.soft_placement)
    if settings.log_placement is not None:
        tf.debugging.set_log_device_placement(settings.log_placement)


def _short(name: str) -> str:
    """Return `cpu:0` for `/device:CPU:0`."""
    return name.rpartition("device:")[2].lower()


def _configure_tensorflow_devices(tf: Any, settings: DeviceSettings) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    virtual, limit = settings.virtual_devices, settings.memory_limit
    make = tf.config.LogicalDeviceConfiguration
    if virtual is not None and virtual[0] == "cpu":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [make()] * virtual[1])
    if virtual is not None and virtual[0] == "gpu":
        _require_gpu(gpus, "virtual GPUs")
        if limit is None:
            raise InputError(
                "Virtual GPUs on TensorFlow need a memory limit for each. Received: None. Call "
                "insitu.base.config.set_memory_limit, or pass --memory-limit."
            )
        tf.config.set_logical_device_configuration(gpus[0], [make(memory_limit=limit)] * virtual[1])
        gpus = gpus[1:]
    if limit is not None and (gpus or virtual is None or virtual[0] == "cpu"):
        _require_gpu(gpus, "a memory limit", soft=True)
        for gpu in gpus:
            tf.config.set_logical_device_configuration(gpu, [make(memory_limit=limit)])
    elif settings.memory_growth is not None:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, settings.memory_growth)


def _require_gpu(gpus: Any, what: str, *, soft: bool = False) -> None:
    if gpus:
        return
    if not soft:
        raise InputError(f"A GPU is needed for {what}. Received: 0 GPUs on this machine. Use cpu:N.")
    warnings.warn(f"There is no GPU: {what} has no effect.", stacklevel=2)


# JAX


def _set_up_jax(settings: DeviceSettings) -> None:
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
        if _jax_has_started():
            found = f"{jax.local_device_count()} devices"
            raise already_started_error("JAX", "Memory and threads", memory, found)
        os.environ.update(memory)


def _jax_has_started() -> bool:
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def _set_jax_cpu_count(jax: Any, count: int) -> None:
    if _jax_has_started():
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


# PyTorch


def _set_up_torch(settings: DeviceSettings) -> None:
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
    if settings.log_placement and not _torch_modes:
        _torch_modes.append(log_operations_of_torch())
    if settings.threads is not None:
        within, beside = settings.threads
        torch.set_num_threads(within)
        if beside is not None and torch.get_num_interop_threads() != beside:
            try:
                torch.set_num_interop_threads(beside)
            except RuntimeError as error:
                found = f"{torch.get_num_interop_threads()} parallel operations"
                raise already_started_error("PyTorch", "Threads", beside, found) from error


# Log the devices of variables and operations, if `insitu.config.set_log_placement` or `--log-placement` asks.
#
# TensorFlow logs each operation itself. A JAX program runs as a whole on the devices of its arguments, so JAX
# logs each program. PyTorch decides at each call: here an operation is logged once for each device


def log_variables(variables: Iterable[Any]) -> None:
    """Print the device of each Keras variable to stderr, if that is asked for."""
    if not config.settings().log_placement:
        return
    for variable in variables:
        _print_line(f"variable {variable.path}: {device_of(variable)}")


def device_of(variable: Any) -> str:
    """Return the device of the variable's value, as its backend writes it."""
    value = getattr(variable, "_value", variable)
    sharding = getattr(value, "sharding", None)
    if sharding is not None:
        devices = ", ".join(sorted(str(d) for d in value.devices()))
        spec = getattr(sharding, "spec", None)
        return devices if spec is None else f"{devices} as {spec}"
    return str(getattr(value, "device", "")) or "not placed yet"


def log_operations_of_torch() -> Any:
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
                _print_line(f"operation {function}: {device}")
            return result

    mode = Placements()
    mode.__enter__()
    return mode


def _print_line(text: str) -> None:
    sys.stderr.write(f"[insitu] {text}\n")
