"""How a step of a custom loop is done over the replicas of all tasks, which a strategy chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from insitu.train.collectives import squeeze_shards
from insitu.train.custom_loop.loop_replica import LoopDeviceReplicas, LoopReplica, MultiDeviceLoopReplica
from insitu.train.custom_loop.step_model import StepModel
from insitu.train.elastic import CUSTOM_LOOP, SynchronousMembership
from insitu.train.fit import StepExecutor, TwoPhaseStep
from insitu.train.replica import ShardBatch
from insitu.train.replicated import MultiDeviceStep

Outputs = list[list[Any] | None]
"""For each part of this task the tensors that the user's step returned, None for one without rows."""


class LoopStep(Protocol):
    """A user's step over all replicas. Collective, unless the step changes nothing."""

    def run(self, parts: Sequence[ShardBatch]) -> Outputs:
        """Run it on the rows of `parts`, one for each shard of this task, at least one of any task with
        rows, and do the update."""


class TrainOrObserveStep:
    """A `LoopStep` that trains by `step`, or only observes if that is None."""

    def __init__(self, replica: LoopReplica, step: StepExecutor | None) -> None:
        self._replica, self._step = replica, step

    def run(self, parts: Sequence[ShardBatch]) -> Outputs:
        self._replica.outputs.clear()
        if self._step is not None:
            self._step.train(CUSTOM_LOOP, parts, lambda place: None)
        else:
            self._observe(parts)
        return [self._replica.outputs.get(part.shard) for part in parts]

    def _observe(self, parts: Sequence[ShardBatch]) -> None:
        """Run a step that trains nothing, and add up the metrics that it moves."""
        raise NotImplementedError


class ExchangeStep(TrainOrObserveStep):
    """Runs the replicas of this task one after the other; the exchange combines all tasks."""

    def __init__(self, model: StepModel, replica: LoopReplica, membership: SynchronousMembership) -> None:
        trains = bool(model.optimizer.groups or replica.floats_size)
        super().__init__(replica, self._make_step(replica, membership) if trains else None)
        self._model = model
        self._group = membership.group()
        self._records = np.zeros((len(membership.context.shards), replica.train_record_size))

    def _make_step(self, replica: Any, membership: SynchronousMembership) -> TwoPhaseStep:
        return TwoPhaseStep(replica, membership.lockstep)

    def _observe(self, parts: Sequence[ShardBatch]) -> None:
        nothing = np.empty((len(parts), 0), self._replica.floats_dtype)
        self._records[:] = 0
        self._compute(parts, nothing)
        if self._model.changes_anything:
            self._replica.apply(nothing[0], self._group.all_gather(squeeze_shards(self._records)))

    def _compute(self, parts: Sequence[ShardBatch], nothing: Any) -> None:
        for index, part in enumerate(parts):
            if part.rows:
                self._replica.gradient(part.shard, part.data, nothing[index], self._records[index])


class MultiDeviceExchangeStep(ExchangeStep):
    """Runs the replicas of this task, each on its device, at the same time."""

    def __init__(
        self, model: StepModel, replica: MultiDeviceLoopReplica, membership: SynchronousMembership
    ) -> None:
        super().__init__(model, replica, membership)
        self._parallel = replica

    def _make_step(self, replica: Any, membership: SynchronousMembership) -> TwoPhaseStep:
        return MultiDeviceStep(replica, membership.lockstep)

    def _compute(self, parts: Sequence[ShardBatch], nothing: Any) -> None:
        if any(part.rows for part in parts):
            self._parallel.gradients(parts, nothing, self._records)


class SingleFunctionStep:
    """Runs all replicas, the sum of their gradients and the update as one function, on the devices of the
    only process."""

    def __init__(self, devices: LoopDeviceReplicas) -> None:
        self._devices = devices

    def run(self, parts: Sequence[ShardBatch]) -> Outputs:
        self._devices.refresh(force=False)
        self._devices.outputs.clear()
        self._devices.train(parts)
        return [self._devices.outputs.get(part.shard) for part in parts]


class RestorePlacementStep:
    """A `LoopStep` after which `restore` moves each variable back to its device."""

    def __init__(self, step: LoopStep, restore: Callable[[], None]) -> None:
        self._step = step
        self._restore = restore

    def run(self, parts: Sequence[ShardBatch]) -> Outputs:
        outputs = self._step.run(parts)
        self._restore()
        return outputs
