"""Where the rows of a step are in global arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.train.backends.jax.spmd.program import plan_rows


@settings(deadline=None)
@given(st.data())
def test_each_row_has_one_place_and_shards_keep_their_order(data: Any):
    counts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    owners = [data.draw(st.integers(0, 2)) for _ in counts]
    hosts = [[s for s, owner in enumerate(owners) if owner == p] for p in range(3)]
    devices = data.draw(st.integers(1, 3))
    plan = plan_rows(counts, hosts, devices)
    assert plan.length % devices == 0
    assert plan.total == 3 * plan.length
    # What the processes would give, filled up with -1.
    rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    given_rows = []
    for shards in hosts:
        own = [row for shard in shards for row in rows[shard].tolist()]
        given_rows += own + [-1] * (plan.length - len(own))
    cut = [row for begin, end in plan.pieces for row in given_rows[begin:end]]
    assert cut == list(range(sum(counts)))
    assert plan.rows == len(cut)
    assert plan.whole == (given_rows == cut and bool(cut))
