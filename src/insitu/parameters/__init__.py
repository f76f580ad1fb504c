"""Parameter servers: variables and tables that live in processes of their own, updated by what workers push.

`ParameterServer` holds and serves, `connect` gives a worker its `Client`. Everything is NumPy arrays:

    with ParameterServer(mode="async") as server, connect([server.address]) as client:
        client.define({"w": ((3,), "float32", numpy.zeros(3, "float32"))}, updater={"name": "adam"})
        client.pull().result()
        client.push(sequence=0, rows=32, gradients={"w": 2 * client.values["w"] + 1}).result()

Each name is loaded on first use, so that importing this package takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.parameters.client import Client, connect
    from insitu.parameters.futures import Future
    from insitu.parameters.modes import ConsistencyPolicy, Mode
    from insitu.parameters.server import ParameterServer
    from insitu.parameters.sharding_plan import MIN_PIECE_BYTES, Piece, ShardingPlan, Variable, plan_sharding
    from insitu.parameters.tables import Eviction, Table
    from insitu.parameters.updaters import FinalizingUpdater, Updater, make_updater

_LAZY = {
    "Client": "client",
    "Eviction": "tables",
    "FinalizingUpdater": "updaters",
    "Future": "futures",
    "ShardingPlan": "sharding_plan",
    "MIN_PIECE_BYTES": "sharding_plan",
    "Mode": "modes",
    "ParameterServer": "server",
    "Piece": "sharding_plan",
    "ConsistencyPolicy": "modes",
    "Table": "tables",
    "Updater": "updaters",
    "Variable": "sharding_plan",
    "connect": "client",
    "plan_sharding": "sharding_plan",
    "make_updater": "updaters",
}

__all__ = [
    "MIN_PIECE_BYTES",
    "Client",
    "ConsistencyPolicy",
    "Eviction",
    "FinalizingUpdater",
    "Future",
    "Mode",
    "ParameterServer",
    "Piece",
    "ShardingPlan",
    "Table",
    "Updater",
    "Variable",
    "connect",
    "make_updater",
    "plan_sharding",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f"insitu.parameters.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'insitu.parameters' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
