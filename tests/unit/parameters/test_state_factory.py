"""States that a server's process creates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.parameters import checkpoints, make_updater, snapshots
from insitu.parameters.mirroring import StateFactory
from insitu.parameters.rules.modes import ConsistencyPolicy, PushEvent
from insitu.parameters.server_state import ServerState
from insitu.parameters.tables import Table


def a_factory(checkpoint: Path | None, nan: str = "refuse") -> StateFactory:
    return StateFactory(ConsistencyPolicy("bounded", 2), nan, make_updater, checkpoint)


def test_only_the_first_server_leads():
    states = [a_factory(None).make(server) for server in range(2)]
    assert [state.policy.is_leader for state in states] == [True, False]
    with pytest.raises(InputError, match="Received: 'ignore'"):
        a_factory(None, "ignore").make(0)


def test_a_state_starts_from_the_newest_checkpoint(tmp_path: Path):
    state = ServerState(1, ConsistencyPolicy("bounded", 2))
    state.define_table(Table("t", 2))
    keys = np.array([7])
    for number in (1, 2):
        push = PushEvent(0, number - 1, 0, 1)
        state.push_rows("t", push, keys, np.ones((1, 2), "f4"), 0.0)
        live = snapshots.begin_live_snapshot(state, {})
        checkpoints.write(checkpoints.server_folder(tmp_path, 1), number, live)
        snapshots.end_live_snapshot(state)
    restored = a_factory(tmp_path).make(1)
    a_factory(tmp_path).restore(restored)
    assert restored.last_applied(0, "t") == 1
    assert restored.push_state.maybe_ahead == {0, 1}
    out, expected = np.empty((1, 2), "f4"), np.empty((1, 2), "f4")
    restored.get_table("t").pull(keys, out)
    state.get_table("t").pull(keys, expected)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("folder", [None, "nothing there"])
def test_a_state_stays_empty_without_a_checkpoint(tmp_path: Path, folder: str | None):
    factory = a_factory(None if folder is None else tmp_path / folder)
    state = factory.make(0)
    factory.restore(state)
    assert state.plan is None and not state.push_state.maybe_ahead
