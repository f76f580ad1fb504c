"""The TensorFlow backend: steps are graphs.

Begin reading with `replica.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from insitu.train.backends.protocol import Backend, from_folder


class TensorFlowBackend(Backend):
    """See `Backend`."""

    builds_by_data = False
    keeps_step_functions = True
    has_one_function_for_all = True

    lend = from_folder("calls:lend")
    view = from_folder("calls:view")
    make_replica = from_folder("replica:TensorFlowReplica")
    make_fused_replica = from_folder("replica:FusedTensorFlow")
    add_up_repeated_rows = from_folder("replica:add_up_repeated_rows")
    make_probe_steps = from_folder("probe:TensorFlowSteps")
    make_device_replica = from_folder("several_devices:TensorFlowMultiDeviceReplica")
    make_device_mover = from_folder("several_devices:TensorFlowDeviceMover")
    trace_step = from_folder("loop:trace_step")
    make_loop_replica = from_folder("loop:LoopReplica")
    make_device_loop_replica = from_folder("loop:LoopDeviceReplicas")
    leave_graph = from_folder("tf_function:leave_graph")
    make_trackable = from_folder("loop:make_trackable")
    record_summaries = from_folder("tf_distribute:record_summaries")
    compile_update = from_folder("calls:compile_update")
    list_devices = from_folder("devices:list_devices")
    set_up_devices = from_folder("devices:set_up")
    start_tpu = from_folder("devices:start_tpu")

    def raw_variable(self, variable: Any) -> Any:
        return getattr(variable, "_value", variable)

    def raw_variable_types(self) -> tuple[type, ...]:
        from tensorflow.python.ops import resource_variable_ops

        return resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable

    def is_tracing(self) -> bool:
        import tensorflow as tf

        return not tf.executing_eagerly()

    def random_functions(
        self, of_keras: Mapping[str, Callable[..., Any]]
    ) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        import tensorflow as tf

        yield from ((tf.random, name, of_keras[name]) for name in ("normal", "truncated_normal", "uniform"))
        yield tf.random, "shuffle", lambda value, **options: value

    def prepare_scripts(self) -> None:
        from insitu.train.backends.tensorflow import tf_distribute, tf_function

        tf_distribute.install()
        tf_function.install()

    def make_spec(self, shape: Any, dtype: str) -> Any:
        import tensorflow as tf

        return tf.TensorSpec(shape, dtype)

    def as_batch(self, leaf: Any) -> Any:
        import tensorflow as tf

        return tf.convert_to_tensor(leaf)

    def out_of_range_error(self) -> Exception:
        import tensorflow as tf

        error: Exception = tf.errors.OutOfRangeError(None, None, "End of sequence")
        return error

    def device_handle(self, device: Any) -> Any:
        return device.native


BACKEND = TensorFlowBackend()
