"""Join the JAX of all tasks of a job into one, so that every task sees the devices of all."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from insitu.base.context import GPUS_ENV
from insitu.base.errors import TrainingError
from insitu.base.net.unauthenticated import refuse_unauthenticated
from insitu.train.elastic import Membership

HEARTBEAT_TIMEOUT = 100.0
"""Seconds without a heartbeat after which JAX counts a task as dead: JAX' default, and the most."""
MIN_HEARTBEAT_TIMEOUT = 10.0
SHUTDOWN_TIMEOUT = 7 * 24 * 3600
"""Seconds that a finished task waits for the others: a week, so practically until they end."""


def connect(membership: Membership) -> None:
    """Set up `jax.distributed` over the workers of the job: gloo between CPUs, NCCL between GPUs.

    Before anything was computed by JAX, in each task; collective. Worker 0 hosts the coordinator, on a free
    port that it sends to the others over the exchange. The coordinator has no secret: any process that
    reaches its port while the job starts can join. So addresses outside of the loopback interface are refused
    unless the user has allowed them.

    A task that fails doesn't wait for the others, as it would by JAX' default. If worker 0 dies, JAX itself
    ends the other processes. Any other loss is noticed when a collective breaks, or after `HEARTBEAT_TIMEOUT`
    seconds, or the stall timeout if that is less.

    Raises TrainingError if JAX has started already, or has joined another coordinator; InputError for such
    addresses.
    """
    context = membership.context
    membership.program_spans_tasks = True
    size, index = len(context.workers), context.index
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (size, index):
            raise TrainingError(
                f"jax.distributed must be that of the job: process {index} of {size}. Received: process "
                f"{jax.process_index()} of {jax.process_count()}. Leave jax.distributed.initialize() out."
            )
        return
    if backend_started():
        raise TrainingError(
            "communication='xla' joins the devices of all tasks, which has to be done before JAX starts. "
            "Received: a process in which JAX has computed something, or has been asked for its devices. "
            "Make the strategy first, right after the imports."
        )
    refuse_unauthenticated("communication='xla'", "Use communication='ring'", context.workers)
    group = membership.group()
    _bind_gloo(context.workers[index].rpartition(":")[0].strip("[]"))
    host = context.workers[0].rpartition(":")[0]
    with _reserved_port(host) if index == 0 else contextlib.nullcontext((host, 0)) as (bind, port):
        port = int(group.broadcast(np.array([port], np.int64))[0])
        _initialize(f"{host}:{port}", f"{bind}:{port}", membership)


def backend_started() -> bool:
    """Return True if JAX has chosen its devices, which can't change afterwards."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def all_devices() -> list[Any]:
    """Return the devices of all tasks, in the order of tasks, those of a task together."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def devices_like(here: list[Any]) -> list[Any]:
    """Return the devices of all tasks with the same local indices as those of `here` in this task."""
    own = [device for device in all_devices() if device.process_index == jax.process_index()]
    indices = [own.index(device) for device in here]
    by_task: dict[int, list[Any]] = {}
    for device in all_devices():
        by_task.setdefault(device.process_index, []).append(device)
    if any(max(indices) >= len(devices) for devices in by_task.values()):
        raise TrainingError(
            "Each task must have the same number of devices. Received: "
            f"{', '.join(str(len(devices)) for devices in by_task.values())} by task. Pass devices=... "
            "that all have."
        )
    return [devices[index] for devices in by_task.values() for index in indices]


def skip_shutdown() -> None:
    """Leave JAX' distributed runtime without waiting for the peers, in a process that is about to fail. The
    kernel frees what JAX holds."""
    from jax._src import distributed

    state = distributed.global_state
    # Keep them alive, even at the interpreter's exit: their destructors would wait, or end the process.
    for held in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None


def _bind_gloo(host: str) -> None:
    """Have gloo, which connects CPUs, listen on this task's own address. By itself it takes the address that
    the machine's name stands for, which others may reach even if all tasks are on the loopback interface.
    """
    from jax._src import xla_bridge

    library: Any = getattr(xla_bridge, "_jax", None) or getattr(xla_bridge.xla_client, "_xla", None)
    make = getattr(library, "make_gloo_tcp_collectives", None)
    if make is not None and _is_of_this_host(host):
        make = getattr(make, "func", make)
        library.make_gloo_tcp_collectives = functools.partial(make, hostname=host)


def _is_of_this_host(host: str) -> bool:
    """Return True if a socket can listen on `host`; False for the address of a gateway."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0]) as probe:
            probe.bind(found[4])
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[tuple[str, int]]:
    """Yield (address to listen on, a free port). The port stays reserved while open: JAX' server shares
    it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((host.strip("[]"), 0))
        except OSError:
            # The address is a gateway's or a name, and not one of this host's interfaces.
            held.bind(("", 0))
            host = "[::]"
        yield host, held.getsockname()[1]


def _initialize(coordinator: str, bind: str, membership: Membership) -> None:
    context = membership.context
    if hasattr(jax.config, "jax_enable_preemption_service"):
        # The service would catch SIGTERM, which stops jobs.
        jax.config.update("jax_enable_preemption_service", False)
    if getattr(jax.config, "jax_cpu_collectives_implementation", "gloo") in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeout = max(1, int(context.stall_timeout))
    options = {
        "initialization_timeout": timeout,
        "heartbeat_timeout_seconds": int(
            max(MIN_HEARTBEAT_TIMEOUT, min(HEARTBEAT_TIMEOUT, context.stall_timeout))
        ),
        "shutdown_timeout_seconds": SHUTDOWN_TIMEOUT,
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": bind,
        "local_device_ids": own_accelerators(context.workers, context.index),
    }
    known = inspect.signature(jax.distributed.initialize).parameters
    try:
        jax.distributed.initialize(
            coordinator,
            len(context.workers),
            context.index,
            **{name: value for name, value in options.items() if name in known},
        )
    except Exception as error:
        raise TrainingError(
            f"JAX' coordinator at {coordinator} did not bring all {len(context.workers)} tasks together: "
            f"{error}"
        ) from error
    sys.excepthook = _wrap_excepthook(sys.excepthook)


def _wrap_excepthook(report: Callable[..., Any]) -> Callable[..., Any]:
    """Return an excepthook that calls `report`, and lets the process end without waiting for its peers."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        skip_shutdown()
        report(kind, error, trace)

    return excepthook


def own_accelerators(workers: tuple[str, ...], index: int) -> list[int] | None:
    """Return the NVIDIA devices of this task if it shares its host with other tasks: an equal part of
    them, since two tasks can't use one. None: all that it sees, as those that a job has given this task."""
    if os.environ.get(GPUS_ENV):
        return None
    host = workers[index].rpartition(":")[0]
    here = [task for task, address in enumerate(workers) if address.rpartition(":")[0] == host]
    visible = visible_accelerators()
    if len(here) == 1 or not visible:
        return None
    if visible < len(here):
        raise TrainingError(
            f"Each task on a host needs a GPU of its own. Received: {len(here)} tasks and {visible} GPUs on "
            f"{host}. Start fewer workers, or use communication='ring'."
        )
    each = visible // len(here)
    first = here.index(index) * each
    return list(range(first, first + each))


def visible_accelerators() -> int:
    """Return the number of NVIDIA devices that this process sees, without starting JAX."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return 0
    if (jax.config.jax_platforms or "").split(",")[0] == "cpu":
        return 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() and not name.strip().startswith("-")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
