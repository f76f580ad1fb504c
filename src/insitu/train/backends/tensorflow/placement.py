"""Layers on devices, on TensorFlow: graphs span devices, so names of operations give the device of each."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from insitu.train.devices import Device
from insitu.train.placement import Placements

_SCOPE = re.compile(r"(?:^|/)insitu_on_(\d+)_")
_devices: list[str] = []
"""The devices, by the numbers in names of scopes."""
_STEPS = ("train_step", "test_step", "predict_step")


class TensorFlowDeviceMover:
    """See `DeviceMover`."""

    def is_on(self, variable: Any, device: Device) -> bool:
        actual, expected = (
            tf.DeviceSpec.from_string(name) for name in (variable.value.device, device.native)
        )
        return bool(
            (actual.device_type, actual.device_index) == (expected.device_type, expected.device_index)
        )

    def move(self, variable: Any, device: Device) -> bool:
        return False

    def wrap(self, layer: Any, device: Device) -> None:
        call = layer.call
        if device.native not in _devices:
            _devices.append(device.native)
        # TensorFlow makes names of scopes unique by a suffix, after the last underscore.
        scope = f"insitu_on_{_devices.index(device.native)}_"

        @functools.wraps(call)
        def on_device(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(scope), tf.device(device.native):
                return call(*args, **kwargs)

        object.__setattr__(layer, "call", on_device)

    def prepare(self, model: Any, optimizers: Sequence[Any], placements: Placements) -> None:
        """Compute gradients where the layer is: their names contain the scope of the layer."""
        if _devices:
            for name in filter(functools.partial(hasattr, model), _STEPS):
                object.__setattr__(model, name, _by_name(getattr(model, name)))


def _by_name(step: Callable[..., Any]) -> Callable[..., Any]:
    def device_of(operation: Any) -> str:
        found = _SCOPE.findall(operation.name)
        return _devices[int(found[-1])] if found else ""

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function():
            return step(*args, **kwargs)
        with tf.compat.v1.get_default_graph().device(device_of):
            return step(*args, **kwargs)

    return stepped
