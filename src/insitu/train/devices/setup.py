"""Configure a backend's devices as `insitu.base.config` says, before the backend starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from insitu.base import config
from insitu.base.config import DeviceSettings
from insitu.base.errors import InputError
from insitu.train.backends import load_backend

_applied: dict[str, DeviceSettings] = {}


def apply_settings(backend: str, settings: DeviceSettings) -> None:
    """Set up `backend`, which is imported. Raises InputError if it has started with other settings, or can't
    apply these."""
    if _applied.get(backend) == settings:
        return
    load_backend(backend).set_up_devices(settings)
    _applied[backend] = settings


def already_started_error(backend: str, what: str, requested: Any, found: Any) -> InputError:
    """Return the error for settings that come too late."""
    return InputError(
        f"{what} must be set before {backend} starts. Received: {requested} after a start with {found}. "
        "Call insitu.config at the top of the script, or give the option to `insitu start`."
    )


# Log the devices of variables and operations, if `insitu.config.set_log_placement` or `--log-placement` asks.
#
# TensorFlow logs each operation itself. A JAX program runs as a whole on the devices of its arguments, so JAX
# logs each program. PyTorch decides at each call: here an operation is logged once for each device


def log_variables(variables: Iterable[Any]) -> None:
    """Print the device of each Keras variable to stderr, if that is asked for."""
    if not config.settings().log_placement:
        return
    for variable in variables:
        print_line(f"variable {variable.path}: {device_of(variable)}")


def device_of(variable: Any) -> str:
    """Return the device of the variable's value, as its backend writes it."""
    value = getattr(variable, "_value", variable)
    sharding = getattr(value, "sharding", None)
    if sharding is not None:
        devices = ", ".join(sorted(str(d) for d in value.devices()))
        spec = getattr(sharding, "spec", None)
        return devices if spec is None else f"{devices} as {spec}"
    return str(getattr(value, "device", "")) or "not placed yet"


def print_line(text: str) -> None:
    """Print a line on devices to stderr."""
    sys.stderr.write(f"[insitu] {text}\n")
