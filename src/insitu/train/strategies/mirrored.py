"""Synchronous training over the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from insitu.context import Context
from insitu.context import context as read_context
from insitu.parent_death import get_replica_config
from insitu.train.custom_loop import LoopStep, StepModel
from insitu.train.devices import Device, can_start_replicas, join_replicas, resolve_all
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
    - PyTorch: a process for each device. Outside a job this process takes the first device and starts the
      others. They run the same script with the same arguments, up to where it ends here; their output is
      shown only if one fails. The weights have the bits of as many shards under
      `MultiWorkerMirroredStrategy`. Whatever else the script does, it does in each process, so write files
      only if `insitu.context().is_chief`. A script can do this for one list of devices. In a job, at a
      prompt, in a notebook and with a `context`, there is one process instead, with one copy of the
      variables, which further devices copy in each step; on CPUs the replicas then run one after the other.

    In a job of several workers each worker has all its devices; insitu's exchange connects the workers.

    Nothing of this has been run on GPUs.

    Args:
        devices: names, such as `["gpu:0", "gpu:2"]`; by default all devices of the best kind.
        cross_device_ops: what scripts for `tf.distribute` pass: how gradients of the devices are added up.
            Where that isn't what the devices do here, a line on stderr says so; `reduction` has what they do.
        context: this process' place in a job; by default read from the environment.

    Raises:
        InputError: for a device that doesn't exist; the message lists those that do.
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
        self.reduction, note = choose_reduction(cross_device_ops, keras.backend.backend(), kinds)
        """How gradients of the devices are added up."""
        if context is None and _uses_processes(chosen):
            device, context = join_replicas(chosen, read_context())
            chosen = [device]
        super().__init__(chosen, None, context)
        tell(note, is_chief=self.membership.context.is_chief)
        publish_choice(self.membership.context, type(self).__name__, self.reduction)

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        workers = len(self.membership.context.workers)
        if keras.backend.backend() == "jax" and len(self.devices) > 1 and workers <= 1:
            from insitu.train.spmd import make_mesh_step

            return make_mesh_step(model, example, [d.handle() for d in self.devices], self.membership)
        return super().make_step(model, example, first=first)

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        workers = len(self.membership.context.workers)
        if keras.backend.backend() == "jax" and len(self.devices) > 1 and workers <= 1:
            from insitu.train.custom_loop.spmd import MeshLoopStep, plan_replica_axis

            devices = np.array([device.handle() for device in self.devices])
            return MeshLoopStep(model, example, plan_replica_axis(devices, len(devices)), self.membership)
        return super().make_loop_step(model, example)


def _uses_processes(devices: Sequence[Device]) -> bool:
    """Return True if each of the devices gets a process of its own, all of which run this script."""
    if keras.backend.backend() != "torch" or len(devices) == 1 or devices[0].kind == "tpu":
        return False
    here = read_context()
    outside = here.job_id is None and not here.workers
    return outside and (get_replica_config() is not None or can_start_replicas())
