"""Run custom loops on parameter servers: `strategy.run` pushes and pulls as a step of `fit` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.errors import TrainingError
from insitu.train.custom_loop import ExchangeAggregation, LoopReplica, TrainOrObserveStep
from insitu.train.elastic import Membership
from insitu.train.parameter_server.step import ServerStep
from insitu.train.replica import ShardBatch


class ServerAggregation:
    """See `LoopAggregation`. Servers that don't wait update by each replica's gradient, a mean over its own
    rows, and no call waits for other workers. With `members`, gradients are summed over them as over the
    exchange: a mode that waits for all gradients may as well count rows with all workers.

    A worker that was restarted runs its script again from the start: what the servers have of its steps is
    computed once more, since the script may want to know what came of it, but not pushed.
    """

    def __init__(self, members: Membership | None) -> None:
        self._summed = None if members is None else ExchangeAggregation(members)
        self.replicas = 1 if self._summed is None else self._summed.replicas

    def count_step_rows(self, rows: Sequence[int]) -> tuple[list[int], int]:
        return (list(rows), 1) if self._summed is None else self._summed.count_step_rows(rows)

    def synchronize(self, variables: Sequence[Any]) -> None:
        """Do nothing: trained variables get their values from the servers, and the rest is each worker's
        own."""


class ServerLoopStep(TrainOrObserveStep):
    """See `LoopStep`. `step` is None where nothing is trained: then only metrics move, each worker's own."""

    def __init__(self, replica: LoopReplica, step: ServerStep | None, shards: int) -> None:
        super().__init__(replica, step)
        self._records = np.zeros((shards, replica.train_record_size))

    def _observe(self, parts: Sequence[ShardBatch]) -> None:
        nothing = np.empty(self._replica.floats_size, self._replica.floats_dtype)
        self._records[:] = 0
        for index, part in enumerate(parts):
            if part.rows:
                self._replica.gradient(part.shard, part.data, nothing, self._records[index])
        if self._records[:, 0].any():
            self._replica.apply(nothing, self._records)


def optimizer_of(model: Any) -> Any:
    """Return the only optimizer of a loop's step. Raises TrainingError for several."""
    groups = model.optimizer.groups
    if len(groups) != 1:
        raise TrainingError(
            "A step on parameter servers trains by one optimizer, which the servers hold. Received: a "
            f"step with {len(groups)}. Use MultiWorkerMirroredStrategy for it."
        )
    return groups[0][0]


def check_coordination(mode: str, shards: int, has_trained: bool) -> None:
    """Raise TrainingError where a coordinator can't hand out steps: `shards` are those of this worker."""
    if mode != "async":
        received = f"mode={mode!r}, in which servers wait for workers that may have no step to run. Pass "
        advice = 'mode="async"'
    elif shards != 1:
        received = f"a worker with {shards} shards. Start the job with "
        advice = "as many workers as the cache has partitions at most, or without a cache"
    elif has_trained:
        received = "a strategy that has trained before. Make the ClusterCoordinator "
        advice = "right behind the strategy"
    else:
        return
    raise TrainingError(
        "A ClusterCoordinator hands out steps, each of which is one worker's own update. Received: "
        f"{received}{advice}."
    )
