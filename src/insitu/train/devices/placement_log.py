"""Log where variables and operations go, if `insitu.config.set_log_placement` or `--log-placement` asks.

TensorFlow logs each operation itself. A JAX program runs as a whole on the devices of its arguments, so JAX
logs each program. PyTorch decides at each call: here an operation is logged once for each device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from insitu import config


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
