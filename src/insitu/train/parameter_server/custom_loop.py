"""Custom loops on parameter servers: `strategy.run` pushes and pulls as a step of `fit` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.errors import TrainingError
from insitu.train.custom_loop import ExchangedTrainer, LoopReplica, TwoWayStep
from insitu.train.elastic import Membership
from insitu.train.parameter_server.step import ServerStep
from insitu.train.replica import Part


class ServerTrainer:
    """See `LoopTrainer`. Servers that don't wait make an update of each replica's gradient, a mean over
    its own rows; no call waits for other workers' calls. With `members`, gradients are summed over them as
    they are over the exchange: who waits for all others' gradients may as well count rows with them.

    A worker that was restarted runs its script again from the start: what the servers have of its steps is
    computed once more, since the script may want to know what came of it, but not pushed.
    """

    def __init__(self, members: Membership | None) -> None:
        self._summed = None if members is None else ExchangedTrainer(members)
        self.replicas = 1 if self._summed is None else self._summed.replicas

    def step_rows(self, rows: Sequence[int]) -> list[int]:
        return list(rows) if self._summed is None else self._summed.step_rows(rows)

    def make_alike(self, variables: Sequence[Any]) -> None:
        """What is trained gets its values from the servers; the rest is each worker's own."""


class ServerLoopStep(TwoWayStep):
    """See `LoopStep`. `step` is None where nothing is trained: then only metrics move, each worker's own."""

    def __init__(self, replica: LoopReplica, step: ServerStep | None, shards: int) -> None:
        super().__init__(replica, step)
        self._records = np.zeros((shards, replica.train_record_size))

    def _observe(self, parts: Sequence[Part]) -> None:
        nothing = np.empty(self._replica.floats_size, self._replica.floats_dtype)
        self._records[:] = 0
        for index, part in enumerate(parts):
            if part.rows:
                self._replica.gradient(part.shard, part.data, nothing, self._records[index])
        if self._records[:, 0].any():
            self._replica.apply(nothing, self._records)


def optimizer_of(model: Any) -> Any:
    """The only optimizer of a loop's step. Raises TrainingError for several."""
    groups = model.optimizer.groups
    if len(groups) != 1:
        raise TrainingError(
            "A step on parameter servers trains by one optimizer, which the servers hold. Received: a "
            f"step with {len(groups)}. Use MultiWorkerMirroredStrategy for it."
        )
    return groups[0][0]
