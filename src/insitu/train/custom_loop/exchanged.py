"""Custom loops whose gradients are summed over the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from insitu.train.collectives import gather_counts
from insitu.train.elastic import Membership
from insitu.train.replica import ModelState, broadcast_state


class ExchangedTrainer:
    """See `LoopTrainer`: each update is that of the sum over all replicas of all tasks."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.replicas = membership.num_shards

    def step_rows(self, rows: Sequence[int]) -> list[int]:
        group = self._membership.group()
        return [sum(rows if group.size == 1 else gather_counts(group, rows))] * len(rows)

    def make_alike(self, variables: Sequence[Any]) -> None:
        nothing = ModelState((), (), (), (), (), (), ())
        broadcast_state(replace(nothing, trainable=tuple(variables)), self._membership.group())
