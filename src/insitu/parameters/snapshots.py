"""All of one server's state as arrays and a description in JSON: for its mirror, and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.base.errors import CheckpointError
from insitu.parameters.closure_queue import ClosureQueue
from insitu.parameters.copy_on_write import SnapshotArray
from insitu.parameters.gradients import Gradients
from insitu.parameters.rules import Array, PushEvent, PushState, PushStats, modes, sharding_plan
from insitu.parameters.server_state import ServerState
from insitu.parameters.tables import Table

FORMAT = 1
"""Increase it with each change of the description or of the arrays' names."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state as it was at one time."""

    #: JSON; see `_describe`.
    meta: dict[str, Any]
    #: By name, such as "values/float32" or "rows/words/keys".
    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """A state as it was at one time, while the state itself keeps changing."""

    #: JSON; see `_describe`.
    meta: dict[str, Any]
    #: By name. Rows of tables are `SnapshotArray`s, read block by block.
    arrays: dict[str, Array | SnapshotArray]


def take_snapshot(state: ServerState) -> Snapshot:
    """Return the state as views, which change with its next update.

    Pushes that the step under way holds are part of it: a server that doesn't lead has acknowledged them.
    """
    arrays = _list_dense_arrays(state)
    for name, rows in state.tables.items():
        arrays |= {f"rows/{name}/{kind}": array for kind, array in rows.arrays().items()}
    arrays |= _list_closure_arrays(state)
    meta = _describe(state)
    for number, (push, gradients) in enumerate(state.held_pushes()):
        prefix = f"held/{number}"
        arrays |= {f"{prefix}/dense/{group}": flat for group, flat in gradients.dense.items()}
        for name, (keys, given) in gradients.rows.items():
            arrays |= {f"{prefix}/keys/{name}": keys, f"{prefix}/rows/{name}": given}
        if gradients.record is not None:
            arrays[f"{prefix}/record"] = gradients.record
        meta["held"].append([push.to_json(), list(gradients.dense), list(gradients.rows)])
    return Snapshot(meta, arrays)


def allocate_copies(state: ServerState, copies: dict[str, Array]) -> None:
    """Add an array to `copies` for each dense array that has none yet.

    Writing to memory for the first time takes longer than the copy itself, so this is done ahead.
    """
    for name, array in _list_dense_arrays(state).items():
        if name not in copies or copies[name].shape != array.shape or copies[name].dtype != array.dtype:
            copies[name] = array.copy()


def begin_live_snapshot(state: ServerState, copies: dict[str, Array]) -> LiveSnapshot:
    """Return the state as it is now, until `end_live_snapshot`.

    Dense arrays, all of which the next update changes, are copied to `copies` at once. Rows of tables are
    copied only when they change.
    """
    allocate_copies(state, copies)
    dense = _list_dense_arrays(state)
    for name, array in dense.items():
        np.copyto(copies[name], array)
    arrays: dict[str, Array | SnapshotArray] = {name: copies[name] for name in dense}
    for name, rows in state.tables.items():
        snapshot = rows.begin_snapshot()
        arrays |= {f"rows/{name}/{kind}": SnapshotArray(snapshot, kind) for kind in snapshot.arrays}
    arrays |= {name: array.copy() for name, array in _list_closure_arrays(state).items()}
    return LiveSnapshot(_describe(state), arrays)


def end_live_snapshot(state: ServerState) -> None:
    """Stop copying rows that change. The live snapshot can't be read any more."""
    for rows in state.tables.values():
        rows.end_snapshot()


def _list_dense_arrays(state: ServerState) -> dict[str, Array]:
    arrays = {f"values/{group}": flat for group, flat in state.values.items()}
    for owner, slots in state.slots.items():
        arrays |= {f"slots/{owner}/{slot}": array for slot, array in slots.items()}
    return arrays


def _list_closure_arrays(state: ServerState) -> dict[str, Array]:
    return {f"closures/{name}": array for name, array in state.closures.list_arrays().items()}


def _describe(state: ServerState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "server": state.server,
        "layout": state.plan_json,
        "updater": state.updater_config,
        "initialised": state.initialised,
        "checkpoints": state.last_checkpoint,
        "finalized": state.last_finalized,
        "learning_rates": state.learning_rates,
        "tables": [
            {"table": rows.table.to_json(), "updates": rows.updates, "evicted": rows.evicted}
            for rows in state.tables.values()
        ],
        "state": state.push_state.to_json(),
        "streams": {name: progress.to_json() for name, progress in state.table_push_states.items()},
        "account": state.stats.to_json(),
        "closures": state.closures.describe(),
        "held": [],
    }


def restore(state: ServerState, snapshot: Snapshot) -> None:
    """Fill an empty state. Raises CheckpointError if the snapshot isn't one of its server."""
    meta, arrays = snapshot.meta, snapshot.arrays
    if meta.get("format") != FORMAT or meta.get("server") != state.server:
        raise CheckpointError(
            f"Server {state.server} can only restore a snapshot of its own, in format {FORMAT}. "
            f"Received: one of server {meta.get('server')}, of format {meta.get('format')}. Give "
            "each server the folder that its job wrote, and use the version of insitu that wrote it"
        )
    if meta["layout"] is not None:
        state.define(sharding_plan.from_json(meta["layout"]), meta["updater"], meta["layout"])
        for group, flat in state.values.items():
            _copy_array(flat, arrays, f"values/{group}")
        for owner, slots in state.slots.items():
            for slot, array in slots.items():
                _copy_array(array, arrays, f"slots/{owner}/{slot}")
    state.initialised = bool(meta["initialised"])
    state.last_checkpoint = int(meta["checkpoints"])
    state.last_finalized = int(meta["finalized"])
    for described in meta["tables"]:
        table = Table.from_json(described["table"])
        state.define_table(table)
        prefix = f"rows/{table.name}/"
        own = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
        state.tables[table.name].load(own, updates=int(described["updates"]))
        state.tables[table.name].evicted = int(described["evicted"])
    state.set_learning_rates(meta.get("learning_rates", {}))
    if "closures" in meta:
        prefix = "closures/"
        own = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
        state.closures = ClosureQueue.restore(meta["closures"], own)
    state.push_state = PushState.from_json(meta["state"])
    state.table_push_states = {name: PushState.from_json(data) for name, data in meta["streams"].items()}
    for number, (push, groups, names) in enumerate(meta["held"]):
        prefix = f"held/{number}"
        dense = {group: arrays[f"{prefix}/dense/{group}"] for group in groups}
        rows = {name: (arrays[f"{prefix}/keys/{name}"], arrays[f"{prefix}/rows/{name}"]) for name in names}
        record = arrays.get(f"{prefix}/record")
        state.push(PushEvent(**push), Gradients(dense, rows, record=record), 0.0)
    # Last, as the held pushes were counted when they first came.
    state.stats = PushStats.from_json(meta["account"])


def mark_restored(state: ServerState) -> None:
    """Record that a state comes from a checkpoint, so that each shard may be ahead of it, once."""
    state.push_state = modes.mark_restored(state.policy, state.push_state)
    state.table_push_states = {
        name: modes.mark_restored(state.policy, progress)
        for name, progress in state.table_push_states.items()
    }


def _copy_array(target: Array, arrays: Mapping[str, Array], name: str) -> None:
    source = arrays.get(name)
    if source is None or source.shape != target.shape or source.dtype != target.dtype:
        found = "nothing" if source is None else f"{source.dtype.name}{list(source.shape)}"
        raise CheckpointError(
            f"A snapshot's {name} must be {target.dtype.name}{list(target.shape)}. Received: {found}. The "
            "snapshot is of another model or version of insitu; start without it"
        )
    target[...] = source
