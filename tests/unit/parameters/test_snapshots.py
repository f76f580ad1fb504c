"""A server's state as arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import CheckpointError
from insitu.parameters import snapshots
from insitu.parameters.gradients import Gradients
from insitu.parameters.rules import sharding_plan
from insitu.parameters.rules.modes import ConsistencyPolicy, PushEvent
from insitu.parameters.rules.sharding_plan import Variable, plan_sharding
from insitu.parameters.server_state import ServerState
from insitu.parameters.tables import Table

PLAN = plan_sharding([Variable("w", (3, 2)), Variable("x", (4,), "float64")], 1)
KEYS = np.array([5, -2])


def a_state(mode: Any = "async", shards: int = 2) -> ServerState:
    state = ServerState(0, ConsistencyPolicy(mode, shards))
    state.define(PLAN, "adam", sharding_plan.to_json(PLAN, sharding_plan.MIN_PIECE_BYTES))
    state.define_table(Table("t", 3, updater="adagrad"))
    state.initialise({"float32": np.arange(6, dtype="f4"), "float64": np.arange(4.0)})
    return state


def push(state: ServerState, shard: int, sequence: int, step: int) -> None:
    dense = {"float32": np.full(6, 0.5, "f4"), "float64": np.full(4, 0.25)}
    rows = {"t": (KEYS, np.ones((2, 3), "f4"))}
    state.push(PushEvent(shard, sequence, step, 8), Gradients(dense, rows), 0.0)


def arrays_of(state: ServerState) -> dict[str, Any]:
    return {name: array.copy() for name, array in snapshots.take_snapshot(state).arrays.items()}


def copy_of(state: ServerState) -> ServerState:
    snapshot = snapshots.take_snapshot(state)
    meta = json.loads(json.dumps(snapshot.meta))
    copy = ServerState(0, state.policy)
    snapshots.restore(copy, snapshots.Snapshot(meta, arrays_of(state)))
    return copy


def assert_same(one: ServerState, other: ServerState) -> None:
    ours, theirs = arrays_of(one), arrays_of(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert one.push_state == other.push_state
    assert one.stats == other.stats


def test_a_restored_state_goes_on_as_the_first():
    state = a_state()
    push(state, 0, 0, 0)
    push(state, 1, 0, 1)
    copy = copy_of(state)
    assert_same(state, copy)
    for each in (state, copy):
        push(each, 0, 1, 2)
    assert_same(state, copy)


def test_held_pushes_are_part_of_it():
    state = a_state("sync")
    push(state, 1, 0, 0)
    copy = copy_of(state)
    assert [event for event, _ in copy.held_pushes()] == [PushEvent(1, 0, 0, 8)]
    for each in (state, copy):
        push(each, 0, 0, 0)
    assert copy.push_state.version == 1
    assert_same(state, copy)


def test_a_live_snapshot_stays_as_it_was():
    state = a_state()
    push(state, 0, 0, 0)
    expected = arrays_of(state)
    live = snapshots.begin_live_snapshot(state, {})
    push(state, 0, 1, 1)
    for name, array in live.arrays.items():
        if isinstance(array, np.ndarray):
            np.testing.assert_array_equal(array, expected[name])
        else:
            out = np.empty(array.shape, array.dtype)
            array.read(0, len(array), out)
            np.testing.assert_array_equal(out, expected[name])
    snapshots.end_live_snapshot(state)


def test_a_restored_state_accepts_a_gap_once():
    state = a_state()
    push(state, 0, 0, 0)
    snapshots.mark_restored(state)
    push(state, 0, 5, 5)
    assert (state.stats.lost, state.last_applied(0)) == (4, 5)


@pytest.mark.parametrize("wrong", [{"server": 1}, {"format": 99}])
def test_a_snapshot_of_another_server_or_format_is_refused(wrong: dict[str, int]):
    snapshot = snapshots.take_snapshot(a_state())
    other = snapshots.Snapshot({**snapshot.meta, **wrong}, snapshot.arrays)
    with pytest.raises(CheckpointError, match="can only restore a snapshot of its own"):
        snapshots.restore(ServerState(0, ConsistencyPolicy()), other)


def test_an_array_that_is_missing_is_named():
    snapshot = snapshots.take_snapshot(a_state())
    del snapshot.arrays["values/float64"]
    with pytest.raises(CheckpointError, match=r"values/float64 must be float64\[4\]. Received: nothing"):
        snapshots.restore(ServerState(0, ConsistencyPolicy()), snapshot)


def test_learning_rates_that_were_set_are_part_of_a_state():
    state = a_state()
    state.set_learning_rates({"": 0.25, "t": 0.5})
    copy = copy_of(state)
    assert copy.learning_rates == {"": 0.25, "t": 0.5}
    for one in (state, copy):
        push(one, 0, 0, 0)
    assert_same(state, copy)
    plain = a_state()
    push(plain, 0, 0, 0)
    for name in ("values/float32", "rows/t/values"):
        assert (arrays_of(plain)[name] != arrays_of(copy)[name]).any()
