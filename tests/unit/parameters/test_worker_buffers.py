"""A worker's buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.exchange import memory
from insitu.parameters.rules.sharding_plan import Variable, plan_sharding
from insitu.parameters.server_connection import PendingRequest, ServerConnection
from insitu.parameters.worker_buffers import WorkerBuffers, as_values

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
variables = st.lists(st.tuples(shapes, st.sampled_from(["float32", "float64"])), max_size=6).map(
    lambda given: [Variable(f"v{i}", shape, dtype) for i, (shape, dtype) in enumerate(given)]
)
PLAN = plan_sharding([Variable("a", (40, 10)), Variable("b", (7,), "float64")], 2, 400)


@settings(max_examples=50, deadline=None)
@given(variables, st.integers(1, 3))
def test_values_of_all_servers_fill_all_variables(given: list[Variable], servers: int):
    plan = plan_sharding(given, servers, 40)
    buffers = WorkerBuffers(plan, (0,), shared=False)
    sent = {}
    for server in range(servers):
        sent[server] = [
            np.arange(plan.server_size(server, group), dtype=group) + 1000 * (server + 1)
            for group in plan.groups
        ]
        buffers.store_values(server, sent[server])
    views = buffers.view_variables(None)
    for piece in plan.pieces:
        flat = sent[piece.server][plan.groups.index(piece.variable.dtype)]
        own = flat[piece.server_offset : piece.server_offset + piece.size].reshape(piece.shape)
        view = views[piece.variable.name]
        part = view[piece.start : piece.stop] if piece.variable.shape else view
        np.testing.assert_array_equal(part, own)
    assert not any(view.any() for view in buffers.view_variables(0).values())


def test_the_parts_of_all_servers_are_the_whole_gradient():
    buffers = WorkerBuffers(PLAN, (3,), shared=False)
    for view in buffers.view_variables(3).values():
        view[...] = 1
    assert sum(part.sum() for server in (0, 1) for part in buffers.view_parts(server, 3)) == 407


def test_another_number_of_groups_is_refused():
    with pytest.raises(InputError, match=r"Server 1 must send 2 groups of values. Received: 0"):
        WorkerBuffers(PLAN, (), shared=False).store_values(1, [])


def a_server(**state: Any) -> ServerConnection:
    server = ServerConnection(0, ["127.0.0.1:1"], 0, b"", "auto")
    vars(server).update(state)
    return server


def test_requests_carry_positions_or_arrays():
    buffers = WorkerBuffers(PLAN, (0,), shared=memory.is_supported())
    try:
        meta, arrays = buffers.locate_parts(a_server(shares_memory=False), 0)
        assert meta == {}
        assert sum(array.size for array in arrays) == sum(PLAN.server_size(0, g) for g in PLAN.groups)
        if buffers.lender is not None:
            meta, arrays = buffers.locate_parts(a_server(shares_memory=True), 0)
            assert meta == {"segment": WorkerBuffers.SEGMENT, "at": buffers.offsets_of(0)}
            assert arrays == []
    finally:
        buffers.close()


def test_pending_requests_can_be_sent_to_a_server_of_another_host():
    buffers = WorkerBuffers(PLAN, (0,), shared=False)
    where = {"segment": 1, "at": buffers.offsets_of(0)}
    keys = np.zeros(2, np.int64)
    meta = {"op": "push", "shard": 0, "ahead": [0], **where}
    push = PendingRequest(0, meta, [keys], (), None)  # type: ignore[arg-type]
    pull = PendingRequest(0, {"op": "pull", "shard": 0, **where}, [], (), None)  # type: ignore[arg-type]
    buffers.inline_pending(a_server(pending={1: push, 2: pull}))
    assert push.meta == {"op": "push", "shard": 0}
    assert len(push.arrays) == 1 + len(buffers.view_parts(0, 0))
    assert push.arrays[-1] is keys
    assert (pull.meta, pull.arrays) == ({"op": "pull", "shard": 0}, [])


def test_values_must_have_shape_and_dtype_of_their_variable():
    like = np.zeros((2, 3), "f4")
    np.testing.assert_array_equal(as_values("a", np.ones((2, 3), "f4"), like), np.ones((2, 3)))
    for wrong in (np.ones(6, "f4"), np.ones((2, 3))):
        with pytest.raises(InputError, match=r"'a' is float32\[2, 3\]"):
            as_values("a", wrong, like)
