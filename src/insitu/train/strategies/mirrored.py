"""Synchronous training over the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from insitu.context import Context
from insitu.train.devices import Device, resolve_all
from insitu.train.step import Step
from insitu.train.strategies.on_devices import OnDevices


class MirroredStrategy(OnDevices):
    """A replica on each device of this machine, each with its own copy of the variables; a step's gradient is
    the mean over all rows of the global batch.

    - TensorFlow: one function for all devices of the process. On CPUs gradients are added in the order of
      the devices, as those of as many shards under `MultiWorkerMirroredStrategy`, with the same weights but
      for rounding (TensorFlow optimises the larger graph in its own way; seen: the last bit of BatchNorm's
      averages). On GPUs NCCL adds.
    - JAX: one program over a mesh of the devices, which computes what one device would for the global batch.

    - PyTorch: one copy of the variables, which further devices copy in each step; on CPUs one replica
      follows the other.

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
        super().__init__(resolve_all(devices), None, context)

    def make_step(self, model: Any, example: Any, *, first: bool) -> Step:
        workers = len(self.membership.context.workers)
        if keras.backend.backend() == "jax" and len(self.devices) > 1 and workers <= 1:
            from insitu.train.mesh import make_mesh_step

            return make_mesh_step(model, example, [d.handle() for d in self.devices], self.membership)
        return super().make_step(model, example, first=first)
