"""Finds out what an agent says about its host. Loads no backend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.base._version import __version__
from insitu.base.paths import Paths
from insitu.base.process.processes import memory_bytes, read_available_bytes
from insitu.base.spec import NodeId
from insitu.grid import make_store_id

if TYPE_CHECKING:
    from insitu.cluster.decide import AgentFacts, AgentLoad

PROCESS = secrets.token_hex(16)
"""Tells this process from others, also of other hosts."""
_PACKAGES = {
    "keras": ("keras",),
    "numpy": ("numpy",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "jax": ("jax",),
    "torch": ("torch",),
}
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def read_versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes; of Python, major and minor."""
    found = {"insitu": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                # "2.13.0+cpu" and "2.13.0+cu128" are builds of one version.
                found[name] = importlib.metadata.version(package).partition("+")[0]
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def list_gpus() -> tuple[str, ...]:
    """Return the model of each NVIDIA GPU that the driver lists."""
    models = []
    for folder in sorted(_NVIDIA.iterdir()) if _NVIDIA.is_dir() else ():
        try:
            lines = (folder / "information").read_text(errors="replace").splitlines()
        except OSError:
            continue
        models.append(next((line.partition(":")[2].strip() for line in lines if "Model:" in line), "GPU"))
    return tuple(models)


def read_processor() -> str:
    """Return the model of the processor; empty where the system doesn't say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def gather_facts(paths: Paths, node: NodeId, address: str, port: int, certificate: str) -> AgentFacts:
    """Return what the agent of `node`, which serves at `address`, says about itself. Raises GridError."""
    from insitu.cluster.decide import (
        AgentFacts,  # not above: `insitu start`, which reads versions, needs no msgspec
    )

    return AgentFacts(
        node=node,
        store=make_store_id(paths, node),
        folder=str(paths.node(node)),
        process=PROCESS,
        host=socket.gethostname(),
        address=address,
        port=port,
        certificate=certificate,
        versions=read_versions(),
        cores=len(os.sched_getaffinity(0)),
        gpus=list_gpus(),
        memory=memory_bytes(),
        disk=shutil.disk_usage(paths.node(node)).total,
        processor=read_processor(),
        clock=time.time(),
    )


def measure_load(paths: Paths, node: NodeId, unknown_versions: int) -> AgentLoad:
    """Return what changes. What can't be read counts as 0."""
    try:
        free = shutil.disk_usage(paths.node(node)).free
    except OSError:
        free = 0
    from insitu.cluster.decide import AgentLoad

    return AgentLoad(max(0, read_available_bytes()), free, unknown_versions)
