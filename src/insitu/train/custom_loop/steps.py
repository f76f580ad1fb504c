"""How a step of a custom loop is done over the replicas of all tasks, which a strategy chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from insitu.train.collectives import by_shard
from insitu.train.custom_loop.loop_replica import LoopDevices, LoopReplica, ParallelLoopReplica
from insitu.train.custom_loop.program import StepModel
from insitu.train.elastic import Membership
from insitu.train.fit import StepExecutor, TwoPhaseStep
from insitu.train.replica import Part
from insitu.train.replicated import ParallelStep

Outputs = list[list[Any] | None]
"""For each part of this task the tensors that the user's step returned, None for one without rows."""


class LoopStep(Protocol):
    """A user's step over all replicas. Collective, unless the step changes nothing."""

    def run(self, parts: Sequence[Part]) -> Outputs:
        """Runs it on the rows of `parts`, one for each shard of this task, at least one of any task with
        rows, and does the update."""


class TwoWayStep:
    """A `LoopStep` that goes one of two ways: by `step` where something is trained, else only observing."""

    def __init__(self, replica: LoopReplica, step: StepExecutor | None) -> None:
        self._replica, self._step = replica, step

    def run(self, parts: Sequence[Part]) -> Outputs:
        self._replica.outputs.clear()
        if self._step is not None:
            self._step.train(parts, lambda place: None)
        else:
            self._observe(parts)
        return [self._replica.outputs.get(part.shard) for part in parts]

    def _observe(self, parts: Sequence[Part]) -> None:
        """A step that trains nothing: metrics are added up, if it moves any."""
        raise NotImplementedError


class ExchangedStep(TwoWayStep):
    """The replicas of this task one after the other; the exchange combines all tasks."""

    def __init__(self, model: StepModel, replica: LoopReplica, membership: Membership) -> None:
        trains = bool(model.optimizer.groups or replica.floats_size)
        super().__init__(replica, self._make_step(replica, membership) if trains else None)
        self._model = model
        self._group = membership.group()
        self._records = np.zeros((len(membership.context.shards), replica.train_record_size))

    def _make_step(self, replica: Any, membership: Membership) -> TwoPhaseStep:
        return TwoPhaseStep(replica, membership.lockstep)

    def _observe(self, parts: Sequence[Part]) -> None:
        nothing = np.empty((len(parts), 0), self._replica.floats_dtype)
        self._records[:] = 0
        self._compute(parts, nothing)
        if self._model.changes_anything:
            self._replica.apply(nothing[0], self._group.all_gather(by_shard(self._records)))

    def _compute(self, parts: Sequence[Part], nothing: Any) -> None:
        for index, part in enumerate(parts):
            if part.rows:
                self._replica.gradient(part.shard, part.data, nothing[index], self._records[index])


class SideBySideStep(ExchangedStep):
    """The replicas of this task, which have a device each, at the same time."""

    def __init__(self, model: StepModel, replica: ParallelLoopReplica, membership: Membership) -> None:
        super().__init__(model, replica, membership)
        self._parallel = replica

    def _make_step(self, replica: Any, membership: Membership) -> TwoPhaseStep:
        return ParallelStep(replica, membership.lockstep)

    def _compute(self, parts: Sequence[Part], nothing: Any) -> None:
        if any(part.rows for part in parts):
            self._parallel.gradients(parts, nothing, self._records)


class OneFunctionStep:
    """All replicas, the sum of their gradients and the update as one function: nothing leaves the devices of
    the only process."""

    def __init__(self, devices: LoopDevices) -> None:
        self._devices = devices

    def run(self, parts: Sequence[Part]) -> Outputs:
        self._devices.refresh(anyway=False)
        self._devices.outputs.clear()
        self._devices.train(parts)
        return [self._devices.outputs.get(part.shard) for part in parts]


class SettledStep:
    """A `LoopStep` after which `settle` is called, which brings every variable back to its device."""

    def __init__(self, step: LoopStep, settle: Callable[[], None]) -> None:
        self._step = step
        self._settle = settle

    def run(self, parts: Sequence[Part]) -> Outputs:
        outputs = self._step.run(parts)
        self._settle()
        return outputs
