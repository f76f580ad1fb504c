"""The PyTorch backend: steps run as they are written.

Begin reading with `replica.py`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.backends.protocol import Backend, from_folder


class TorchBackend(Backend):
    """See `Backend`."""

    has_numbers_in_steps = True

    make_replica = from_folder("replica:TorchReplica")
    make_fused_replica = from_folder("replica:FusedTorch")
    make_probe_steps = from_folder("probe:TorchSteps")
    random_functions = from_folder("probe:random_functions")
    make_device_replica = from_folder("several_devices:TorchMultiDeviceReplica")
    make_device_mover = from_folder("several_devices:TorchDeviceMover")
    trace_step = from_folder("loop:trace_step")
    make_loop_replica = from_folder("loop:LoopReplica")
    make_device_loop_replica = from_folder("loop:LoopDeviceReplicas")
    leave_graph = from_folder("loop:leave_graph")
    list_devices = from_folder("devices:list_devices")
    set_up_devices = from_folder("devices:set_up")

    def view(self, variable: Any) -> NDArray[Any]:
        import keras

        return np.asarray(keras.ops.convert_to_numpy(variable.value))

    def identify_value(self, variable: Any) -> Any:
        return variable.value.data_ptr(), variable.value._version

    def loses_device_by_bad_index(self) -> bool:
        from keras.src.backend.torch.core import get_device

        return get_device() not in ("cpu", "meta")

    def device_handle(self, device: Any) -> Any:
        import torch

        return torch.device(device.native)

    def device_scope_name(self, device: Any) -> str:
        name: str = device.native
        return name

    def has_started(self) -> bool:
        return "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_initialized())

    def start_tpu(self, tpu: Any) -> None:
        importlib.import_module("torch_xla")


BACKEND = TorchBackend()
