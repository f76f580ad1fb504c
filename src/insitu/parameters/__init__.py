"""Parameter servers: variables and tables that live in processes of their own, updated by what workers push.

`ParameterServer` holds and serves, `connect` gives a worker its `Client`. Everything is NumPy arrays:

    with ParameterServer(mode="async") as server, connect([server.address]) as client:
        client.define({"w": ((3,), "float32", numpy.zeros(3, "float32"))}, updater={"name": "adam"})
        client.pull().result()
        client.push(sequence=0, rows=32, gradients={"w": 2 * client.values["w"] + 1}).result()

Importing it costs nothing but itself; what it needs is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.parameters.client import Client, connect
    from insitu.parameters.futures import Future
    from insitu.parameters.layout import MIN_PIECE_BYTES, Layout, Piece, Variable, lay_out
    from insitu.parameters.modes import Mode, Rules
    from insitu.parameters.server import ParameterServer
    from insitu.parameters.tables import Eviction, Table
    from insitu.parameters.updaters import Finalizing, Updater, make_updater

_LAZY = {
    "Client": "client",
    "Eviction": "tables",
    "Finalizing": "updaters",
    "Future": "futures",
    "Layout": "layout",
    "MIN_PIECE_BYTES": "layout",
    "Mode": "modes",
    "ParameterServer": "server",
    "Piece": "layout",
    "Rules": "modes",
    "Table": "tables",
    "Updater": "updaters",
    "Variable": "layout",
    "connect": "client",
    "lay_out": "layout",
    "make_updater": "updaters",
}

__all__ = [
    "MIN_PIECE_BYTES",
    "Client",
    "Eviction",
    "Finalizing",
    "Future",
    "Layout",
    "Mode",
    "ParameterServer",
    "Piece",
    "Rules",
    "Table",
    "Updater",
    "Variable",
    "connect",
    "lay_out",
    "make_updater",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f"insitu.parameters.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'insitu.parameters' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
