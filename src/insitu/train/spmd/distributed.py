"""Joins the JAX of all tasks of a job into one: every task then sees the devices of all."""

from __future__ import annotations

import contextlib
import ctypes
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

from insitu.errors import TrainingError
from insitu.train.elastic import Membership

HEARTBEAT = 100.0
"""Seconds without a sign of life after which JAX counts a task as dead: its own default, and the most."""
LEAST_HEARTBEAT = 10.0
PATIENT = 7 * 24 * 3600
"""Seconds that a task that is done waits for the others: as long as they live."""


def connect(membership: Membership) -> None:
    """Sets up `jax.distributed` over the workers of the job: gloo between CPUs, NCCL between GPUs.

    Before anything was computed by JAX, in each task; collective. Worker 0 hosts the coordinator, on a free
    port that it tells the others over the exchange. The coordinator has no secret: whoever reaches its port
    while the job starts can take part, so let only hosts of the job reach it.

    A task that fails under way doesn't wait for the others to be done, as JAX would have it. If worker 0 dies
    JAX itself ends the other processes; any other loss is noticed where a collective breaks, or after
    `HEARTBEAT` seconds, or the stall timeout where that is less.

    Raises TrainingError where JAX has started already, or by somebody else's coordinator for other tasks.
    """
    context = membership.context
    size, index = len(context.workers), context.index
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (size, index):
            raise TrainingError(
                f"jax.distributed must be that of the job: process {index} of {size}. Received: process "
                f"{jax.process_index()} of {jax.process_count()}. Leave jax.distributed.initialize() out."
            )
        return
    if started():
        raise TrainingError(
            "communication='xla' joins the devices of all tasks, which has to be done before JAX starts. "
            "Received: a process in which JAX has computed something, or has been asked for its devices. "
            "Make the strategy first, right after the imports."
        )
    group = membership.group()
    host = context.workers[0].rpartition(":")[0]
    with _reserved_port(host) if index == 0 else contextlib.nullcontext((host, 0)) as (bind, port):
        port = int(group.broadcast(np.array([port], np.int64))[0])
        _set_up(f"{host}:{port}", f"{bind}:{port}", membership)


def started() -> bool:
    """Whether JAX has chosen its devices: from then on they are what they are."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def all_devices() -> list[Any]:
    """The devices of all tasks, those of a task together, in the order of tasks."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def devices_like(here: list[Any]) -> list[Any]:
    """The devices of all tasks that have the same places there as those of `here` have in this one."""
    own = [device for device in all_devices() if device.process_index == jax.process_index()]
    places = [own.index(device) for device in here]
    by_task: dict[int, list[Any]] = {}
    for device in all_devices():
        by_task.setdefault(device.process_index, []).append(device)
    if any(max(places) >= len(devices) for devices in by_task.values()):
        raise TrainingError(
            "Each task must have as many devices. Received: "
            f"{', '.join(str(len(devices)) for devices in by_task.values())} by task."
        )
    return [devices[place] for devices in by_task.values() for place in places]


def abandon() -> None:
    """This process is about to fail: it won't wait for its peers. What JAX holds is left to the kernel."""
    from jax._src import distributed

    state = distributed.global_state
    # Never destroyed, not even at the interpreter's end: their destructors would wait, or end the process.
    for held in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[tuple[str, int]]:
    """(address to listen at, a free port), kept free while open: JAX' server shares it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((host.strip("[]"), 0))
        except OSError:
            # An address of a gateway, or a name: it isn't one of this host's own.
            held.bind(("", 0))
            host = "[::]"
        yield host, held.getsockname()[1]


def _set_up(coordinator: str, bind: str, membership: Membership) -> None:
    context = membership.context
    if hasattr(jax.config, "jax_enable_preemption_service"):
        # It would take SIGTERM, by which jobs are stopped.
        jax.config.update("jax_enable_preemption_service", False)
    if getattr(jax.config, "jax_cpu_collectives_implementation", "gloo") in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    patience = max(1, int(context.stall_timeout))
    wanted = {
        "initialization_timeout": patience,
        "heartbeat_timeout_seconds": int(max(LEAST_HEARTBEAT, min(HEARTBEAT, context.stall_timeout))),
        "shutdown_timeout_seconds": PATIENT,
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
            **{name: value for name, value in wanted.items() if name in known},
        )
    except Exception as error:
        raise TrainingError(
            f"JAX' coordinator at {coordinator} did not bring all {len(context.workers)} tasks together: "
            f"{error}"
        ) from error
    sys.excepthook = _abandoning(sys.excepthook)


def _abandoning(report: Callable[..., Any]) -> Callable[..., Any]:
    """`report`, an excepthook, which also frees the process from waiting for its peers."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        abandon()
        report(kind, error, trace)

    return excepthook


def own_accelerators(workers: tuple[str, ...], index: int) -> list[int] | None:
    """The NVIDIA devices that this task may use where it shares its host with other tasks: an even part of
    them, since two tasks can't use one. None: all that it sees."""
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
    """How many NVIDIA devices this process sees, found without starting JAX."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return 0
    if (jax.config.jax_platforms or "").split(",")[0] == "cpu":
        return 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() and not name.strip().startswith("-")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
