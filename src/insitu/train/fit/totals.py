"""Add up, over all shards, what the losses of a step divide by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from insitu.exchange import Group
from insitu.train.collectives import squeeze_shards
from insitu.train.replica import NeedsTotals, Replica, ShardBatch


def with_totals(
    replica: Replica,
    parts: Sequence[ShardBatch],
    group: Group,
    compute: Callable[[], None],
    *,
    training: bool,
) -> None:
    """Call `compute`, which runs a step of `replica` on each of `parts`. Where losses need totals, these are
    exchanged before. All tasks find out alike, in their first step. Collective."""
    if not replica.needs_totals(training=training):
        try:
            compute()
            if not any(part.rows for part in parts):
                replica.find_out(training=training)
            return
        except NeedsTotals:
            pass
    _exchange_totals(replica, parts, group, training=training)
    compute()


def _exchange_totals(replica: Replica, parts: Sequence[ShardBatch], group: Group, *, training: bool) -> None:
    counts = [replica.count_losses(part.shard, part.data, training=training) for part in parts]
    own = np.stack([[part.rows, *count] for part, count in zip(parts, counts, strict=True)])
    totals = group.all_gather(squeeze_shards(own.astype(np.float64))).sum(0)
    replica.set_totals(totals, training=training)
