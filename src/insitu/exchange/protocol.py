"""Describes what must be equal on all ranks so that they understand each other's bytes.

Ranks cut and order what they send by constants of the code. If these differ, sums would be wrong without any
error. So each rank sends a digest of them, and a difference is an error.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import mmap
import struct
import sys
from collections.abc import Mapping
from typing import Any

from insitu.base._version import __version__

PROTOCOL_KEYS = ("version", "byte_order", "page_size", "constants")
"""The facts in a rank's info that must be equal."""
_MODULES = (
    *(
        "algorithms",
        "schedule_runner",
        "compression",
        "hierarchical",
        "memory_links",
        "native",
        "peer_connections",
        "pages",
    ),
    *("shm", "shm_barrier", "shm_layout", "shm_reductions", "shm_session", "tcp", "tcp_session"),
    *(
        "plan.arithmetic",
        "plan.costs",
        "plan.reduce_plan",
        "plan.schedule",
        "plan.topology",
        "plan.transport",
    ),
)
"""The modules that shape what ranks send each other or write to shared memory."""
_LOCAL = ("TIMEOUT", "INTERVAL", "SLEEP", "POLLS")
"""Parts of the names of constants by which a rank waits; they may differ."""
_PLAIN = (int, float, str, bytes, tuple, list, dict)


def describe_protocol(
    package: str = "insitu.exchange", modules: tuple[str, ...] = _MODULES
) -> dict[str, Any]:
    """Return the facts that must be equal on both sides, by PROTOCOL_KEYS, for a protocol that the constants
    of
    these modules shape."""
    values = __version__, sys.byteorder, mmap.PAGESIZE, compute_digest(package, modules)
    return dict(zip(PROTOCOL_KEYS, values, strict=True))


@functools.cache
def compute_digest(package: str = "insitu.exchange", modules: tuple[str, ...] = _MODULES) -> str:
    """Return a digest of all constants in capital letters of the modules."""
    text = hashlib.sha256()
    for name in modules:
        module = importlib.import_module(f"{package}.{name}")
        text.update(f"{name}\n{_describe_constants(vars(module))}\n".encode())
    return text.hexdigest()[:32]


def _describe_constants(values: Mapping[str, Any]) -> str:
    """Return the names and values of the constants that are plain values or formats."""
    described = {}
    for name, value in sorted(values.items()):
        if not name.strip("_").isupper() or any(word in name for word in _LOCAL):
            continue
        if isinstance(value, struct.Struct):
            described[name] = value.format
        elif isinstance(value, _PLAIN):
            described[name] = _describe_value(value)
    return repr(described)


def _describe_value(value: Any) -> str:
    """Return plain values as they are, and of others, such as functions in a table, only the type."""
    if isinstance(value, dict):
        return repr({str(key): _describe_value(item) for key, item in sorted(value.items(), key=str)})
    if isinstance(value, tuple | list):
        return repr([_describe_value(item) for item in value])
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
