"""Parameter servers: variables and tables that live in processes of their own, updated by what workers push.

`ParameterServer` holds and serves, `connect` gives a worker its `Client`. Everything is NumPy arrays:

    with ParameterServer(mode="async") as server, connect([server.address]) as client:
        client.define({"w": ((3,), "float32", numpy.zeros(3, "float32"))}, updater={"name": "adam"})
        client.pull().result()
        client.push(sequence=0, rows=32, gradients={"w": 2 * client.values["w"] + 1}).result()

Each name is loaded on first use, so that importing this package takes no time.
Begin reading with `server.py`, then `client.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.parameters.client import Client, connect
    from insitu.parameters.closure_client import ClosureClient
    from insitu.parameters.futures import Future
    from insitu.parameters.gradients import check_nan_policy
    from insitu.parameters.native import copy_and_check
    from insitu.parameters.rules import (
        MIN_PIECE_BYTES,
        ConsistencyPolicy,
        Mode,
        Piece,
        ShardingPlan,
        Variable,
        plan_sharding,
    )
    from insitu.parameters.server import ParameterServer
    from insitu.parameters.tables import Eviction, Table
    from insitu.parameters.updaters import (
        FinalizingUpdater,
        InitialisingUpdater,
        Updater,
        make_updater,
        set_learning_rate,
    )

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "client": ("Client", "connect"),
        "closure_client": ("ClosureClient",),
        "futures": ("Future",),
        "gradients": ("check_nan_policy",),
        "native": ("copy_and_check",),
        "rules": (
            "ShardingPlan",
            "MIN_PIECE_BYTES",
            "Mode",
            "Piece",
            "ConsistencyPolicy",
            "Variable",
            "plan_sharding",
        ),
        "server": ("ParameterServer",),
        "tables": ("Eviction", "Table"),
        "updaters": (
            *("FinalizingUpdater", "InitialisingUpdater", "Updater"),
            *("make_updater", "set_learning_rate"),
        ),
    },
)

__all__ = [
    "MIN_PIECE_BYTES",
    "Client",
    "ClosureClient",
    "ConsistencyPolicy",
    "Eviction",
    "FinalizingUpdater",
    "Future",
    "InitialisingUpdater",
    "Mode",
    "ParameterServer",
    "Piece",
    "ShardingPlan",
    "Table",
    "Updater",
    "Variable",
    "check_nan_policy",
    "connect",
    "copy_and_check",
    "make_updater",
    "plan_sharding",
    "set_learning_rate",
]
