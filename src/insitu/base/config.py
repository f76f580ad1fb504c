"""Set up a backend's devices: virtual devices, memory, placement, threads.

Everything here holds for a backend that hasn't started yet, so call it at the top of a script, or leave it
to `insitu start --virtual-devices 2` and the like. A setting is stored in the environment, where child
processes find it. It reaches the backend when that is imported, or at once if it has been imported already.

| function              | variable                 | value                                  |
|-----------------------|--------------------------|----------------------------------------|
| `set_virtual_devices` | `INSITU_VIRTUAL_DEVICES` | `cpu:4`, `gpu:2`                       |
| `set_memory_growth`   | `INSITU_MEMORY_GROWTH`   | `1` or `0`                             |
| `set_memory_limit`    | `INSITU_MEMORY_LIMIT`    | MiB of each GPU                        |
| `set_soft_placement`  | `INSITU_SOFT_PLACEMENT`  | `1` or `0`                             |
| `set_log_placement`   | `INSITU_LOG_PLACEMENT`   | `1` or `0`                             |
| `set_threads`         | `INSITU_BACKEND_THREADS` | threads in an operation, or `2,1`      |

`list_physical_devices`, `list_logical_devices`, `set_visible_devices`, `set_logical_device_configuration` and
`experimental.set_memory_growth` are those of `tf.config`, for single devices. They have no variable.

Example:
    >>> insitu.config.set_threads(1, 1)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from insitu.base.errors import InputError
from insitu.base.process.import_hooks import call_after_import

__all__ = [
    "DeviceSettings",
    "set_log_placement",
    "set_memory_growth",
    "set_memory_limit",
    "set_soft_placement",
    "set_threads",
    "set_virtual_devices",
    "settings",
]

BACKENDS = ("tensorflow", "jax", "torch")
KINDS = ("cpu", "gpu")
MAX_VIRTUAL = 1024

_PREFIX = "INSITU_"
_NAMES = {
    "virtual_devices": f"{_PREFIX}VIRTUAL_DEVICES",
    "memory_growth": f"{_PREFIX}MEMORY_GROWTH",
    "memory_limit": f"{_PREFIX}MEMORY_LIMIT",
    "soft_placement": f"{_PREFIX}SOFT_PLACEMENT",
    "log_placement": f"{_PREFIX}LOG_PLACEMENT",
    "threads": f"{_PREFIX}BACKEND_THREADS",
}


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """The settings that were asked for; None leaves the backend's own default."""

    virtual_devices: tuple[str, int] | None = None
    """(kind, number of devices to make out of one), such as ("cpu", 4)."""
    memory_growth: bool | None = None
    """Take a GPU's memory as it is needed, instead of nearly all of it at the start."""
    memory_limit: int | None = None
    """MiB that may be used of each GPU; with virtual GPUs, of each of them."""
    soft_placement: bool | None = None
    """Use the CPU, with a warning, if a device is asked for that doesn't exist."""
    log_placement: bool | None = None
    """Print the devices of variables and operations."""
    threads: tuple[int, int | None] | None = None
    """(threads within one operation, operations in parallel or None)."""

    def __post_init__(self) -> None:
        if self.virtual_devices is not None:
            kind, count = self.virtual_devices
            if kind not in KINDS or not 1 <= count <= MAX_VIRTUAL:
                raise InputError(
                    f"Virtual devices are cpu:N or gpu:N, with N in [1, {MAX_VIRTUAL}]. "
                    f"Received: {kind}:{count}"
                )
        if self.memory_limit is not None and self.memory_limit < 1:
            raise InputError(
                f"A memory limit is in MiB and must be at least 1. Received: {self.memory_limit}"
            )
        if self.threads is not None and any(n is not None and n < 1 for n in self.threads):
            raise InputError(f"Threads must be at least 1. Received: {self.threads}")

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that hold these settings, without those that are None."""
        return {_NAMES[field]: _format(value) for field, value in asdict(self).items() if value is not None}


def parse_virtual_devices(text: str) -> tuple[str, int]:
    """Return ("cpu", 4) for `cpu:4` or `4`. Raises InputError."""
    kind, _, count = text.strip().lower().rpartition(":")
    if not count.isdecimal() or (kind or "cpu") not in KINDS:
        raise InputError(f"Virtual devices are given as N, cpu:N or gpu:N, such as cpu:4. Received: {text!r}")
    return kind or "cpu", int(count)


def read_settings(environ: Mapping[str, str]) -> DeviceSettings:
    """Return the settings that `environ` holds. Raises InputError for a value of another form."""
    given = {field: environ[name] for field, name in _NAMES.items() if environ.get(name)}
    return DeviceSettings(**{field: _parse(field, text) for field, text in given.items()})


def settings() -> DeviceSettings:
    """Return the settings of this process, made by calls or by its environment."""
    return read_settings(os.environ)


def set_virtual_devices(count: int, kind: str = "cpu") -> None:
    """Make `count` devices out of the first one of `kind` ("cpu" or "gpu").

    TensorFlow makes both kinds; for several virtual GPUs it needs a memory limit. JAX makes several CPU
    devices. PyTorch has one CPU device: there virtual ones are names, `cpu:0` to `cpu:N-1`, which replicas in
    processes of their own are given.

    Raises:
        InputError: for another kind or number, or if the backend has started with other devices.
    """
    _change(virtual_devices=(kind, count))


def set_memory_growth(on: bool = True) -> None:
    """Let the backend take each GPU's memory as it needs it. Raises InputError once the backend has
    started."""
    _change(memory_growth=on)


def set_memory_limit(mebibytes: int) -> None:
    """Limit the memory taken of each GPU, in MiB. Raises InputError once the backend has started."""
    _change(memory_limit=mebibytes)


def set_soft_placement(on: bool = True) -> None:
    """Use `cpu:0`, with a warning, if a device is asked for that doesn't exist. Off, that is an error."""
    _change(soft_placement=on)


def set_log_placement(on: bool = True) -> None:
    """Print to stderr the device of each variable and each operation."""
    _change(log_placement=on)


def set_threads(threads: int, interop: int | None = None) -> None:
    """Let `threads` threads share one operation, and up to `interop` operations run in parallel.

    Their number changes the backend's rounding: in a job it is `insitu start --threads` that sets it.
    """
    _change(threads=(threads, interop))


_OLD_NAMES = (
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "experimental",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "set_logical_device_configuration",
    "set_visible_devices",
)
"""The part of `tf.config` for single devices."""
_providers: list[Callable[[str], Any]] = []


def provide_old_names(load: Callable[[str], Any]) -> None:
    """Have `load(name)` give what `tf.config` has of single devices, which this module can't know."""
    _providers[:] = [load]


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES or not _providers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _providers[0](name)


_subscribers: list[Callable[[str, DeviceSettings], None]] = []


def subscribe(function: Callable[[str, DeviceSettings], None]) -> None:
    """Call `function(backend, settings)` whenever settings are to be applied to an imported backend.

    This module doesn't know the backends: it also loads in the command line, and in tasks without any.
    """
    _subscribers.append(function)


def _change(**values: Any) -> None:
    changed = replace(settings(), **values)
    before = {name: os.environ.get(name) for name in _NAMES.values()}
    os.environ.update(changed.to_environment())
    try:
        apply_device_settings()
    except BaseException:
        for name, value in before.items():
            _set_variable(os.environ, name, value)
        raise


def _set_variable(environ: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value is None:
        environ.pop(name, None)
    else:
        environ[name] = value


def apply_device_settings() -> None:
    """Apply the settings to the imported backends now, and to the others right after their import.

    Raises InputError for a backend that has started with other settings.
    """
    if not any(os.environ.get(name) for name in _NAMES.values()):
        return
    for backend, notify in _NOTIFIERS.items():
        call_after_import(backend, notify)


def _notify(backend: str) -> None:
    for function in _subscribers:
        function(backend, settings())


_NOTIFIERS = {backend: partial(_notify, backend) for backend in BACKENDS}


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        joint = ":" if isinstance(value[0], str) else ","
        return joint.join(str(part) for part in value if part is not None)
    return str(value)


def _parse(field: str, text: str) -> Any:
    if field == "virtual_devices":
        return parse_virtual_devices(text)
    try:
        if field == "memory_limit":
            return int(text)
        if field == "threads":
            within, _, beside = text.partition(",")
            return int(within), int(beside) if beside else None
        return {"0": False, "1": True}[text]
    except (ValueError, KeyError) as error:
        form = {"memory_limit": "a number of MiB", "threads": "one or two numbers, such as 2,1"}
        raise InputError(
            f"{_NAMES[field]} must be {form.get(field, '0 or 1')}. Received: {text!r}"
        ) from error
