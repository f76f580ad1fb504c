"""All that one server holds, as arrays and a description in JSON: for a mirror, and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.errors import CheckpointError
from insitu.parameters import modes, sharding_plan
from insitu.parameters.copy_on_write import SnapshotArray
from insitu.parameters.modes import PushEvent, PushState
from insitu.parameters.server_state import Gradients, PushStats, ServerState
from insitu.parameters.tables import Table
from insitu.parameters.wire import Array

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    meta: dict[str, Any]
    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """A snapshot of what goes on changing: rows are read in blocks, each as it was."""

    meta: dict[str, Any]
    arrays: dict[str, Array | SnapshotArray]


def take(holdings: ServerState) -> Snapshot:
    """Views of what the server holds, which change with its next update. Pushes that the step under way holds
    are in it too: a server that doesn't lead has acknowledged that it holds them."""
    arrays = _dense(holdings)
    for name, rows in holdings.rows.items():
        arrays |= {f"rows/{name}/{kind}": array for kind, array in rows.arrays().items()}
    meta = _describe(holdings)
    for number, (push, gradients) in enumerate(holdings.held()):
        prefix = f"held/{number}"
        arrays |= {f"{prefix}/dense/{group}": flat for group, flat in gradients.dense.items()}
        for name, (keys, given) in gradients.rows.items():
            arrays |= {f"{prefix}/keys/{name}": keys, f"{prefix}/rows/{name}": given}
        meta["held"].append([push.to_json(), list(gradients.dense), list(gradients.rows)])
    return Snapshot(meta, arrays)


def make_room(holdings: ServerState, room: dict[str, Array]) -> None:
    """Puts arrays into `room` for copies of all that is dense, where there are none yet. New memory takes the
    system longer than to copy to it."""
    for name, array in _dense(holdings).items():
        if name not in room or room[name].shape != array.shape or room[name].dtype != array.dtype:
            room[name] = array.copy()


def keep(holdings: ServerState, room: dict[str, Array]) -> LiveSnapshot:
    """What the server holds now, until `let_go`. Dense arrays, all of which the next update changes, are
    copied at once, to `room`; rows of tables only as they are changed."""
    make_room(holdings, room)
    dense = _dense(holdings)
    for name, array in dense.items():
        np.copyto(room[name], array)
    arrays: dict[str, Array | SnapshotArray] = {name: room[name] for name in dense}
    for name, rows in holdings.rows.items():
        moment = rows.moment()
        arrays |= {f"rows/{name}/{kind}": SnapshotArray(moment, kind) for kind in moment.arrays}
    return LiveSnapshot(_describe(holdings), arrays)


def let_go(holdings: ServerState) -> None:
    """Nobody reads any more what `keep` gave."""
    for rows in holdings.rows.values():
        rows.let_go()


def _dense(holdings: ServerState) -> dict[str, Array]:
    arrays = {f"values/{group}": flat for group, flat in holdings.values.items()}
    for owner, slots in holdings.slots.items():
        arrays |= {f"slots/{owner}/{slot}": array for slot, array in slots.items()}
    return arrays


def _describe(holdings: ServerState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "server": holdings.server,
        "layout": holdings.told,
        "updater": holdings.config,
        "initialised": holdings.initialised,
        "checkpoints": holdings.checkpoints,
        "finalized": holdings.finalized,
        "tables": [
            {"table": rows.table.to_json(), "updates": rows.updates, "evicted": rows.evicted}
            for rows in holdings.rows.values()
        ],
        "state": holdings.state.to_json(),
        "streams": {name: state.to_json() for name, state in holdings.streams.items()},
        "account": holdings.account.to_json(),
        "held": [],
    }


def put(holdings: ServerState, snapshot: Snapshot) -> None:
    """Fills holdings that are new. Raises CheckpointError where the two don't go together."""
    meta, arrays = snapshot.meta, snapshot.arrays
    if meta.get("format") != FORMAT or meta.get("server") != holdings.server:
        raise CheckpointError(
            f"What server {meta.get('server')} held (format {meta.get('format')}) can't be held by server "
            f"{holdings.server} (format {FORMAT})"
        )
    if meta["layout"] is not None:
        holdings.define(sharding_plan.from_json(meta["layout"]), meta["updater"], meta["layout"])
        for group, flat in holdings.values.items():
            _copy(flat, arrays, f"values/{group}")
        for owner, slots in holdings.slots.items():
            for slot, array in slots.items():
                _copy(array, arrays, f"slots/{owner}/{slot}")
    holdings.initialised = bool(meta["initialised"])
    holdings.checkpoints = int(meta["checkpoints"])
    holdings.finalized = int(meta["finalized"])
    for told in meta["tables"]:
        table = Table.from_json(told["table"])
        holdings.define_table(table)
        prefix = f"rows/{table.name}/"
        own = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
        holdings.rows[table.name].load(own, updates=int(told["updates"]))
        holdings.rows[table.name].evicted = int(told["evicted"])
    holdings.state = PushState.from_json(meta["state"])
    holdings.streams = {name: PushState.from_json(state) for name, state in meta["streams"].items()}
    for number, (push, groups, names) in enumerate(meta["held"]):
        prefix = f"held/{number}"
        dense = {group: arrays[f"{prefix}/dense/{group}"] for group in groups}
        rows = {name: (arrays[f"{prefix}/keys/{name}"], arrays[f"{prefix}/rows/{name}"]) for name in names}
        holdings.push(PushEvent(**push), Gradients(dense, rows), 0.0)
    holdings.account = PushStats.from_json(meta["account"])


def go_on_from(holdings: ServerState) -> None:
    """Says that these holdings come from a checkpoint: workers may be ahead of them, once."""
    holdings.state = modes.restored(holdings.rules, holdings.state)
    holdings.streams = {n: modes.restored(holdings.rules, s) for n, s in holdings.streams.items()}


def _copy(target: Array, arrays: Mapping[str, Array], name: str) -> None:
    source = arrays.get(name)
    if source is None or source.shape != target.shape or source.dtype != target.dtype:
        found = "nothing" if source is None else f"{source.dtype.name}{list(source.shape)}"
        raise CheckpointError(f"{name} must be {target.dtype.name}{list(target.shape)}. Found: {found}")
    target[...] = source
