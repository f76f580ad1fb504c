"""The JAX backend: steps are pure functions of a model's state.

Begin reading with `replica.py`.
"""

from __future__ import annotations

import sys
from typing import Any

from insitu.base.errors import TrainingError
from insitu.train.backends.protocol import Backend, from_folder


class JaxBackend(Backend):
    """See `Backend`."""

    has_wide_integers = False
    trains_as_compiled = True
    compiles_loops = True

    meshes = from_folder("spmd")
    check_delegated = from_folder("replica:refuse_distribution")
    keras_methods = from_folder("replica:keras_methods")
    wrap_train_function = from_folder("replica:as_trainer_function")
    make_replica = from_folder("replica:JaxReplica")
    make_fused_replica = from_folder("replica:FusedJax")
    make_probe_steps = from_folder("probe:JaxSteps")
    random_functions = from_folder("probe:random_functions")
    make_device_replica = from_folder("several_devices:JaxMultiDeviceReplica")
    make_device_mover = from_folder("several_devices:JaxDeviceMover")
    trace_step = from_folder("loop:trace_step")
    make_loop_replica = from_folder("loop:LoopReplica")
    make_device_loop_replica = from_folder("loop:LoopDeviceReplicas")
    leave_graph = from_folder("loop:leave_graph")
    compile_update = from_folder("replica:compile_update")
    list_devices = from_folder("devices:list_devices")
    device_handle = from_folder("devices:find_handle")
    set_up_devices = from_folder("devices:set_up")

    def identify_value(self, variable: Any) -> Any:
        return variable.value

    def compile_once(self, function: Any) -> Any:
        import jax

        # A function of its own: what was compiled before isn't taken.
        return jax.jit(lambda *arrays: function(*arrays))

    def has_started(self) -> bool:
        if "jax" not in sys.modules:
            return False
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())

    def start_tpu(self, tpu: Any) -> None:
        tpu = getattr(tpu, "tpu", tpu)
        if tpu:
            raise TrainingError(f"JAX uses the TPU of its own machine: leave tpu out. Received: {tpu!r}")


BACKEND = JaxBackend()
