"""Sum the gradients of custom loops over the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from insitu.train.collectives import gather_counts
from insitu.train.elastic import Membership
from insitu.train.replica import ModelState, broadcast_state


class ExchangeAggregation:
    """See `LoopAggregation`. Each update uses the sum over all replicas of all tasks."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.replicas = membership.num_shards

    def count_step_rows(self, rows: Sequence[int]) -> tuple[list[int], int]:
        group = self._membership.group()
        counts = rows if group.size == 1 else gather_counts(group, rows)
        return [sum(counts)] * len(rows), sum(count > 0 for count in counts)

    def synchronize(self, variables: Sequence[Any]) -> None:
        nothing = ModelState((), (), (), (), (), (), ())
        broadcast_state(replace(nothing, trainable=tuple(variables)), self._membership.group())
