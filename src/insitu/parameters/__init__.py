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

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.parameters.client import Client, ClosureClient, connect
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

__getattr__, __dir__ = export_lazily(__name__)
