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
from insitu.train.devices import Device, can_start, one_of, resolve_all
from insitu.train.fit import StepExecutor
from insitu.train.strategies.on_devices import OnDevices


class MirroredStrategy(OnDevices):
    """A replica on each device of this machine, each with its own copy of the variables; a step's gradient is
    the mean over all rows of the global batch.

    - TensorFlow: one function for all devices of the process. On CPUs gradients are added in the order of
      the devices, as those of as many shards under `MultiWorkerMirroredStrategy`, with the same weights but
      for rounding (TensorFlow optimises the larger graph in its own way; seen: the last bit of BatchNorm's
      averages). On GPUs NCCL adds.
    - JAX: one program over a mesh of the devices, which computes what one device would for the global batch.
    - PyTorch: a process for each device. Outside a job this process takes the first and starts the others:
      they run the same script with the same arguments, silently, up to where it ends here; what they write is
      shown only if one fails. The weights are the bits of as many shards under `MultiWorkerMirroredStrategy`.
      What a script does beside training it does in each, so let `insitu.context().is_chief` guard what
      writes files. A script is started for one list of devices. In a job, at a prompt, in a notebook and
      with a `context` it is one process instead, with one copy of the variables, which further devices copy
      in each step; on CPUs one replica then follows the other.

    GPUs are not verified.

    In a job of several workers each has all its devices; between them is insitu's exchange.

    Args:
        devices: all devices of the best kind by default; some by name, such as `["gpu:0", "gpu:2"]`.
        context: who this process is; read from the environment by default.

    Raises:
        InputError: for a device that isn't there; the message lists those that are.
    """

    def __init__(
        self, devices: Sequence[str | Device] | None = None, *, context: Context | None = None
    ) -> None:
        chosen = resolve_all(devices)
        if context is None and _by_processes(chosen):
            device, context = one_of(chosen, read_context())
            chosen = [device]
        super().__init__(chosen, None, context)

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        workers = len(self.membership.context.workers)
        if keras.backend.backend() == "jax" and len(self.devices) > 1 and workers <= 1:
            from insitu.train.spmd import make_mesh_step

            return make_mesh_step(model, example, [d.handle() for d in self.devices], self.membership)
        return super().make_step(model, example, first=first)

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        workers = len(self.membership.context.workers)
        if keras.backend.backend() == "jax" and len(self.devices) > 1 and workers <= 1:
            from insitu.train.custom_loop.spmd import MeshLoopStep, replica_layout

            devices = np.array([device.handle() for device in self.devices])
            return MeshLoopStep(model, example, replica_layout(devices, len(devices)), self.membership)
        return super().make_loop_step(model, example)


def _by_processes(devices: Sequence[Device]) -> bool:
    """Whether each of the devices gets a process of its own, all of which run this script."""
    if keras.backend.backend() != "torch" or len(devices) == 1 or devices[0].kind == "tpu":
        return False
    here = read_context()
    outside = here.job_id is None and not here.workers
    return outside and (get_replica_config() is not None or can_start())
