"""The base of strategies whose replicas are devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.train.backends import active_backend
from insitu.train.custom_loop import (
    LoopStep,
    MultiDeviceExchangeStep,
    SingleFunctionStep,
    StepModel,
)
from insitu.train.devices import Device
from insitu.train.fit import StepExecutor
from insitu.train.replica import plan_combination
from insitu.train.replicated import MultiDeviceStep, SingleProcessStep, pin_step
from insitu.train.strategies.base import warn_unverified
from insitu.train.strategies.synchronous import SynchronousStrategy


class MultiDeviceStrategy(SynchronousStrategy):
    """One replica on each of `devices`; variables on `home`, or on each device if that is None.

    Each shard of the job is split over the devices, so that a job of W tasks with D devices has W x D
    replicas.
    """

    def __init__(self, devices: Sequence[Device], home: Device | None, context: Context | None) -> None:
        self.devices = tuple(devices)
        self._home = home
        context = (context or read_context()).for_strategy()
        if len(self.devices) > 1 and len(context.shards) != 1:
            raise TrainingError(
                f"A task with several devices has one shard, which it splits over them. Received: the shards "
                f"{list(context.shards)} and {len(self.devices)} devices. Start the job without --shards."
            )
        super().__init__(context=context.split_over(len(self.devices)))

    @property
    def delegates_to_keras(self) -> bool:
        return super().delegates_to_keras and self._home in (None, self.devices[0])

    def placement(self) -> AbstractContextManager[Any]:
        return (self._home or self.devices[0]).scope()

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        if len(self.devices) == 1 and self._home in (None, self.devices[0]):
            return pin_step(super().make_step(model, example, first=first), self.devices[0])
        membership = self._membership
        replica = self._replica(model, example)
        if active_backend().has_one_function_for_all and len(membership.context.workers) <= 1:
            return SingleProcessStep(replica, membership)
        # All at once or none: a task that computes on several devices isn't replaced alone.
        membership.reporter.disable_recovery()
        if first:
            self._broadcast_initial_state(model)
        step = MultiDeviceStep(replica, membership.lockstep)
        return pin_step(step, self._home or self.devices[0])

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        if len(self.devices) == 1 and self._home in (None, self.devices[0]):
            return super().make_loop_step(model, example)
        membership = self._membership
        replica = active_backend().make_device_loop_replica(model, example, *self._places())
        if active_backend().has_one_function_for_all and len(membership.context.workers) <= 1:
            return SingleFunctionStep(replica)
        return MultiDeviceExchangeStep(model, replica, membership)

    def _replica(self, model: Any, example: Any) -> Any:
        plan = plan_combination(model, example, self.num_replicas_in_sync)
        warn_unverified(plan, model, self._membership)
        return active_backend().make_device_replica(model, example, *self._places(), plan)

    def _places(self) -> tuple[list[Any], Sequence[int], Any]:
        """Return the devices, the shard of each, and the home or None."""
        devices = [device.handle() for device in self.devices]
        return devices, self._membership.context.shards, self._home.handle() if self._home else None
