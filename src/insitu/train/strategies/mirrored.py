"""Synchronous training over the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.base.context import Context
from insitu.train.backends import active_backend, active_name
from insitu.train.custom_loop import LoopStep, StepModel
from insitu.train.devices import Device, resolve_all
from insitu.train.fit import StepExecutor
from insitu.train.strategies.communication import choose_reduction, publish_choice, tell
from insitu.train.strategies.multi_device import MultiDeviceStrategy


class MirroredStrategy(MultiDeviceStrategy):
    """A replica on each device of this machine, each with its own copy of the variables.

    A step's gradient is the mean over all rows of the global batch.

    - TensorFlow: one function for all devices of the process. It copies the gradients between the devices and
      adds them in the order of the devices. The weights are those of as many shards under
      `MultiWorkerMirroredStrategy`, but for rounding, because TensorFlow optimises the larger graph
      differently (seen: the last bit of BatchNorm's averages). Collectives such as NCCL are not used, also
      not on GPUs.
    - JAX: one program over a mesh of the devices. It computes what one device would for the global batch.
    - PyTorch: one copy of the variables, which further devices copy in each step. The weights have the bits
      of as many shards under `MultiWorkerMirroredStrategy`. On CPUs one replica runs after the other, each
      with all threads. `insitu start --workers N` gives each replica a process of its own.

    In a job of several workers each worker has all its devices; insitu's exchange connects the workers.

    Nothing of this has been run on GPUs.

    Args:
        devices: names, such as `["gpu:0", "gpu:2"]`; by default all devices of the best kind.
        cross_device_ops: as scripts for `tf.distribute` pass it: how gradients of the devices are added up.
            If the devices add otherwise here, a line on stderr says so; `reduction` has their way.
        context: this process' place in a job; by default read from the environment.

    Raises:
        InputError: for a device that doesn't exist; the message lists those that do.

    Example:
        >>> strategy = insitu.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: Any = None,
        *,
        context: Context | None = None,
    ) -> None:
        chosen = resolve_all(devices)
        kinds = {device.kind for device in chosen}
        self.reduction, note = choose_reduction(cross_device_ops, active_name(), kinds)
        """How gradients of the devices are added up."""
        super().__init__(chosen, None, context)
        tell(note, is_chief=self.membership.context.is_chief)
        publish_choice(self.membership.context, type(self).__name__, self.reduction)

    @property
    def _runs_one_program(self) -> bool:
        workers = len(self.membership.context.workers)
        return len(self.devices) > 1 and workers <= 1 and active_backend().meshes is not None

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        if self._runs_one_program:
            make = active_backend().meshes.make_mesh_step
            step: StepExecutor = make(model, example, [d.handle() for d in self.devices], self.membership)
            return step
        return super().make_step(model, example, first=first)

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        if self._runs_one_program:
            meshes = active_backend().meshes
            devices = np.array([device.handle() for device in self.devices])
            over = meshes.plan_replica_axis(devices, len(devices))
            step: LoopStep = meshes.MeshLoopStep(model, example, over, self.membership)
            return step
        return super().make_loop_step(model, example)
