"""The exchange: moves buffers between the tasks of a job. `join` returns a `Group`.

Importing it is cheap: the modules behind it are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.exchange.group import Group
    from insitu.exchange.joining import join

_LAZY = {"Group": "insitu.exchange.group", "join": "insitu.exchange.joining"}

__all__ = ["Group", "join"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'insitu.exchange' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
