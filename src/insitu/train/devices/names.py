"""List the devices of this machine, under names that are the same on every backend: `cpu:0`, `gpu:1`,
`tpu:0`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from insitu.base import config
from insitu.base.errors import InputError
from insitu.train.backends import active_name, load_backend

_KINDS = {
    "cpu": "cpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
    "xpu": "gpu",
    "mps": "gpu",
    "tpu": "tpu",
    "xla": "tpu",
}
_TFRT_NAME = re.compile(r"tfrt_(cpu)_(\d+)")
_JAX_REPR = re.compile(r"(\w+?)device\(id=(\d+)\)")
_KIND_AND_INDEX = re.compile(r"([a-z]+)(?::(\d+|\*))?")


@dataclass(frozen=True, slots=True)
class Device:
    """One device of one backend in this process."""

    name: str
    """`kind:index`, the same on every backend."""
    kind: str
    """`cpu`, `gpu` or `tpu`."""
    index: int
    """Its number among those of its kind, from 0."""
    backend: str
    """`tensorflow`, `jax` or `torch`."""
    native: str
    """The backend's own name of it."""
    model: str = ""
    """The hardware, empty for CPUs."""
    memory: int | None = None
    """Bytes, None if unknown."""
    virtual: bool = False
    """True if it shares its hardware with other devices."""

    def handle(self) -> Any:
        """Return the backend's own object: a name for TensorFlow, a `jax.Device`, a `torch.device`."""
        return load_backend(self.backend).device_handle(self)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """While open, variables are made and operations run on the device."""
        import keras

        with keras.device(load_backend(self.backend).device_scope_name(self)):
            yield


def list_devices(backend: str | None = None) -> list[Device]:
    """Return the local devices of `backend`, accelerators first; by default those of Keras' backend. Starts
    the backend.

    Raises InputError for a backend that isn't there, or that has started with other devices than
    `insitu.base.config` asks for.
    """
    backend = backend or active_name()
    if backend not in config.BACKENDS:
        raise InputError(f"A backend is one of {', '.join(config.BACKENDS)}. Received: {backend!r}")
    if backend not in sys.modules and importlib.util.find_spec(backend) is None:
        raise InputError(f"The backend {backend!r} isn't installed. Install it: pip install {backend}")
    importlib.import_module(backend)
    config.apply_device_settings()
    return sorted(
        load_backend(backend).list_devices(), key=lambda d: (("tpu", "gpu", "cpu").index(d.kind), d.index)
    )


def default_device(backend: str | None = None) -> Device:
    """Return the first accelerator, or `cpu:0`."""
    return list_devices(backend)[0]


def parse_name(text: str) -> tuple[str, int]:
    """Return ("cpu", 1) for `cpu:1` or a backend's own form: `/device:CPU:1`, `cuda:1`, `CpuDevice(id=1)`.

    Raises InputError.
    """
    name = str(text).strip().lower()
    if name.startswith("/"):
        name = name.rpartition("/")[2].removeprefix("device:")
    for pattern in (_TFRT_NAME, _JAX_REPR, _KIND_AND_INDEX):
        found = pattern.fullmatch(name)
        if found and found[1] in _KINDS:
            index = found[2]
            return _KINDS[found[1]], int(index) if index not in (None, "*") else 0
    raise InputError(
        f"A device is KIND:INDEX with a kind of cpu, gpu, tpu, such as cpu:0. Received: {text!r}"
    )


def resolve(device: str | Device, backend: str | None = None) -> Device:
    """Return the device of that name. With soft placement, `cpu:0` replaces one that doesn't exist, with a
    warning.

    Raises InputError, which lists the devices that there are.
    """
    if isinstance(device, Device):
        return device
    kind, index = parse_name(device)
    devices = list_devices(backend)
    for found in devices:
        if (found.kind, found.index) == (kind, index):
            return found
    there = ", ".join(d.name for d in devices)
    if config.settings().soft_placement:
        warnings.warn(f"There is no device {kind}:{index}: cpu:0 is used. There are: {there}", stacklevel=2)
        return next(d for d in devices if d.kind == "cpu")
    hint = ""
    if kind == "cpu":
        hint = f" For more CPU devices call insitu.config.set_virtual_devices({index + 1}) first."
    raise InputError(
        f"A device must be one of {there} on {devices[0].backend}. Received: {kind}:{index}.{hint}"
    )


def resolve_all(names: Sequence[str | Device] | None, backend: str | None = None) -> list[Device]:
    """Return the devices of these names, each once; for None all of the best kind. With soft placement
    `cpu:0` replaces all that don't exist.

    Raises InputError.
    """
    if names is None:
        devices = list_devices(backend)
        return [d for d in devices if d.kind == devices[0].kind]
    if isinstance(names, str) or not names:
        raise InputError(f"Devices are a list of names with at least one. Received: {names!r}")
    requested = {(n.kind, n.index) if isinstance(n, Device) else parse_name(n) for n in names}
    if len(requested) != len(names):
        raise InputError(f"Each device may be named once. Received: {', '.join(map(str, names))}")
    # Once each: several that aren't there have the same replacement.
    return list({found.name: found for found in (resolve(name, backend) for name in names)}.values())


def main() -> None:
    """Print the devices of the backend named by the first argument as JSON, for `insitu devices`."""
    try:
        answer: Any = [asdict(device) for device in list_devices(sys.argv[1])]
    except InputError as error:
        answer = {"error": error.message}
    sys.stdout.write(f"{json.dumps(answer)}\n")
