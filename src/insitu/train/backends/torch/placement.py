"""Layers on devices, on PyTorch: inputs are moved in and outputs out, and gradients go the same way back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import torch
from keras.src.backend.torch.core import get_device

from insitu.train.devices import Device
from insitu.train.placement import Placements


class TorchDeviceMover:
    """See `DeviceMover`."""

    def is_on(self, variable: Any, device: Device) -> bool:
        return bool(variable.value.device == torch.empty(0, device=device.native).device)

    def move(self, variable: Any, device: Device) -> bool:
        with torch.no_grad():
            variable.value.data = variable.value.data.to(device.native)
        return True

    def wrap(self, layer: Any, device: Device) -> None:
        call = layer.call

        @functools.wraps(call)
        def on_device(*args: Any, **kwargs: Any) -> Any:
            home = get_device()
            args, kwargs = _to(device.native, (args, kwargs))
            with device.scope():
                outputs = call(*args, **kwargs)
            return _to(home, outputs)

        object.__setattr__(layer, "call", on_device)

    def prepare(self, model: Any, optimizers: Sequence[Any], placements: Placements) -> None:
        pass


def _to(device: str, structure: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, structure
    )
