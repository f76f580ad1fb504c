"""One copy of the variables, computation on every device."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.base.context import Context
from insitu.train.devices import Device, resolve, resolve_all
from insitu.train.strategies.multi_device import MultiDeviceStrategy


class CentralStorageStrategy(MultiDeviceStrategy):
    """A replica on each of `compute_devices`, which all read the one copy of the variables on
    `parameter_device`; the mean gradient, added in the order of the devices, updates it there.

    It needs the memory of one copy of the optimizer's state, and sends the weights in each step. With the
    same number of devices the weights are those of as many shards under `MultiWorkerMirroredStrategy`: on
    JAX and PyTorch bit for bit, on TensorFlow but for rounding. On PyTorch the CPU computes one replica after
    the other.

    Args:
        compute_devices: all devices of the best kind by default.
        parameter_device: the device of the variables and the optimizer's state.
        context: who this process is; read from the environment by default.

    Raises:
        InputError: for a device that isn't there; the message lists those that are.

    Example:
        >>> strategy = insitu.CentralStorageStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device = "cpu:0",
        *,
        context: Context | None = None,
    ) -> None:
        home = resolve(parameter_device)
        super().__init__(resolve_all(compute_devices), home, context)
        self.parameter_device = home
