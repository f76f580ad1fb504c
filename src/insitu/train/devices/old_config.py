"""Functions of `tf.config` for single devices, under its names in `insitu.base.config`.

On TensorFlow these are its own functions. JAX and PyTorch see the GPUs that CUDA_VISIBLE_DEVICES names as
they start, and set up all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from insitu.base import config
from insitu.base.errors import InputError
from insitu.train.backends import active_name, load_backend
from insitu.train.devices.names import list_devices

_DRIVER = Path("/proc/driver/nvidia/gpus")
_VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """A device of this machine, as `tf.config.PhysicalDevice`."""

    #: Such as "/physical_device:GPU:0".
    name: str
    #: "CPU" or "GPU".
    device_type: str


@dataclass(frozen=True, slots=True)
class LogicalDevice:
    """A device that the backend has, as `tf.config.LogicalDevice`."""

    #: Such as "/device:GPU:0".
    name: str
    #: "CPU", "GPU" or "TPU".
    device_type: str


@dataclass(frozen=True, slots=True)
class LogicalDeviceConfiguration:
    """One of the devices that are made of another, as `tf.config.LogicalDeviceConfiguration`."""

    #: MiB of a GPU; None: no limit.
    memory_limit: int | None = None


def list_physical_devices(device_type: str | None = None) -> list[Any]:
    """Return the devices of this machine that the backend may use, without starting it."""
    if active_name() == "tensorflow":
        found: list[Any] = _tensorflow().list_physical_devices(device_type)
        return found
    kinds = ["CPU"] + ["GPU"] * len(_read_visible())
    devices = [
        PhysicalDevice(f"/physical_device:{kind}:{max(0, i - 1)}", kind) for i, kind in enumerate(kinds)
    ]
    return [device for device in devices if device_type in (None, device.device_type)]


def list_logical_devices(device_type: str | None = None) -> list[Any]:
    """Return the devices that the backend has. This starts it."""
    if active_name() == "tensorflow":
        found: list[Any] = _tensorflow().list_logical_devices(device_type)
        return found
    devices = [LogicalDevice(f"/device:{d.kind.upper()}:{d.index}", d.kind.upper()) for d in list_devices()]
    return [device for device in devices if device_type in (None, device.device_type)]


def set_visible_devices(devices: Any, device_type: str | None = None) -> None:
    """Let the backend see these devices alone, of those of `device_type`; None: of all. Raises InputError
    once it has started."""
    if active_name() == "tensorflow":
        _call_tensorflow("set_visible_devices", devices, device_type)
        return
    listed = list(devices) if isinstance(devices, Sequence) else [devices] if devices else []
    if device_type in (None, "CPU") and not any(device.device_type == "CPU" for device in listed):
        raise InputError(
            f"The CPU is always used on {active_name()}. Received: {devices!r} as the visible devices. "
            "Name it, or pass device_type='GPU'"
        )
    if device_type == "CPU":
        return
    _refuse_started("Visible devices", devices)
    known = _read_visible()
    numbers = [_number_of(device, known) for device in listed if device.device_type == "GPU"]
    os.environ[_VISIBLE_ENV] = ",".join(known[number] for number in numbers) or "-1"


def get_visible_devices(device_type: str | None = None) -> list[Any]:
    """Return the devices that the backend may use."""
    if active_name() == "tensorflow":
        found: list[Any] = _tensorflow().get_visible_devices(device_type)
        return found
    return list_physical_devices(device_type)


def set_memory_growth(device: Any, enable: bool) -> None:
    """Let the backend take the memory of a GPU as it needs it. Raises InputError once it has started, and if
    it can't set up one GPU alone."""
    if active_name() == "tensorflow":
        _call_tensorflow("experimental.set_memory_growth", device, enable)
        return
    _check_alone(device, "memory growth", f"insitu.base.config.set_memory_growth({enable})")
    config.set_memory_growth(enable)


def set_logical_device_configuration(device: Any, logical_devices: Sequence[Any]) -> None:
    """Make several devices of one, or limit its memory. Raises InputError once the backend has started, and
    if it can't."""
    if active_name() == "tensorflow":
        make = _tensorflow().LogicalDeviceConfiguration
        own = [make(memory_limit=each.memory_limit) for each in logical_devices]
        _call_tensorflow("set_logical_device_configuration", device, own)
        return
    limits = [each.memory_limit for each in logical_devices]
    if len(limits) != 1:
        config.set_virtual_devices(len(limits), device.device_type.lower())
    elif limits[0] is not None:
        _check_alone(device, "a memory limit", f"insitu.base.config.set_memory_limit({limits[0]})")
        config.set_memory_limit(limits[0])


experimental = SimpleNamespace(
    VirtualDeviceConfiguration=LogicalDeviceConfiguration,
    get_visible_devices=get_visible_devices,
    list_logical_devices=list_logical_devices,
    list_physical_devices=list_physical_devices,
    set_memory_growth=set_memory_growth,
    set_virtual_device_configuration=set_logical_device_configuration,
    set_visible_devices=set_visible_devices,
)
"""Functions with these names in `tf.config.experimental`."""


def _tensorflow() -> Any:
    import tensorflow as tf

    return tf.config


def _call_tensorflow(name: str, *arguments: Any) -> None:
    """Call a function of `tf.config`. Raises InputError for what it refuses."""
    function = _tensorflow()
    for part in name.split("."):
        function = getattr(function, part)
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"tf.config.{name}: {error}. Received: {arguments!r}") from error


def _read_visible() -> list[str]:
    """Return what CUDA calls the GPUs that this process may use."""
    named = os.environ.get(_VISIBLE_ENV)
    if named is None:
        return [str(number) for number in range(len(list(_DRIVER.glob("*"))))]
    words = [word.strip() for word in named.split(",")]
    return [word for word in words if word and not word.startswith("-")]


def _number_of(device: Any, known: Sequence[str]) -> int:
    number = int(str(device.name).rpartition(":")[2])
    if number >= len(known):
        raise InputError(
            f"A GPU is one of list_physical_devices('GPU'), which has {len(known)}. Received: {device.name}"
        )
    return number


def _check_alone(device: Any, what: str, instead: str) -> None:
    """Raise InputError if a setting of one GPU would be that of others, too."""
    known = _read_visible()
    if device.device_type == "GPU":
        _number_of(device, known)
    if len(known) > 1:
        raise InputError(
            f"{active_name()} sets up all GPUs alike. Received: {what} of {device.name}, one of "
            f"{len(known)}. Call {instead} for all, or let the process see one by set_visible_devices"
        )


def _refuse_started(what: str, value: Any) -> None:
    if load_backend(active_name()).has_started():
        raise InputError(
            f"{what} must be set before {active_name()} starts. Received: {value!r} after its start. Set "
            "them at the top of the script"
        )
