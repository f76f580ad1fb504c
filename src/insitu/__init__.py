"""insitu: train where the data lives.

Names are loaded on first use, so that `import insitu` and the command line stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insitu._version import __version__

if TYPE_CHECKING:
    from insitu import errors, exchange
    from insitu.context import Context, context

_LAZY = {
    "Context": "insitu.context",
    "context": "insitu.context",
}
_MODULES = ("errors", "exchange")

__all__ = ["Context", "__version__", "context", "errors", "exchange"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"insitu.{name}")
    raise AttributeError(f"module 'insitu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
