"""A model's replicas on several PyTorch devices that read one copy of the variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.torch.core import get_device
from numpy.typing import NDArray

from insitu.train.backends.torch.replica import TorchReplica
from insitu.train.devices import Device
from insitu.train.placement import Placements
from insitu.train.replica import CombinationPlan, ShardBatch


class TorchMultiDeviceReplica(TorchReplica):
    """Variables stay where they are; each step sends them to the devices. Calls to an accelerator return
    before they are done, so that several compute at the same time; on CPUs one shard follows the other, each
    with all threads."""

    def __init__(
        self,
        model: Any,
        data: Any,
        devices: Sequence[Any],
        shards: Sequence[int] = (),
        home: Any = None,
        plan: CombinationPlan | None = None,
        *,
        copy: bool | None = None,
    ) -> None:
        """`copy` says that the devices have memory of their own. None: find out."""
        del shards, home  # each part has its own shard, and variables stay where they are
        super().__init__(model, data, plan)
        self._copies_by_device = [
            _DeviceCopy(model, data, device, self.make_replica)
            if (device != _device_of(model) if copy is None else copy)
            else None
            for device in devices
        ]
        for each in self._copies_by_device:
            if each is not None:
                each.share_losses(self)

    def make_replica(self, model: Any, data: Any) -> TorchReplica:
        """Return the replica that computes on a further device."""
        return TorchReplica(model, data, self._plan)

    def gradients(
        self, parts: Sequence[ShardBatch], floats: NDArray[Any], records: NDArray[np.float64]
    ) -> None:
        """See `MultiDeviceReplica`."""
        for index, (copy, part) in enumerate(zip(self._copies_by_device, parts, strict=True)):
            if part.rows and copy is None:
                self.gradient(part.shard, part.data, floats[index], records[index])
            elif part.rows and copy is not None:
                copy.gradient(part, floats[index], records[index])


class _DeviceCopy:
    """One further device with copies of all that a step reads."""

    def __init__(
        self, model: Any, data: Any, device: Any, make_replica: Callable[[Any, Any], TorchReplica]
    ) -> None:
        self._device = str(device)
        self._variables = list({id(v): v for v in model.variables}.values())
        self._own = [variable._value for variable in self._variables]
        self._copies = [_copy_of(own, device) for own in self._own]
        with self._swapped_in():
            self._replica = make_replica(model, data)

    def share_losses(self, main: TorchReplica) -> None:
        """Let losses divide as those of `main`, whose state of them is this one's from now on."""
        self._replica.losses = main.losses

    def gradient(self, part: ShardBatch, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        with torch.no_grad():
            for own, copy in zip(self._own, self._copies, strict=True):
                copy.copy_(own, non_blocking=True)
                # A model clears the gradients of its own parameters only.
                copy.grad = None
        with self._swapped_in():
            self._replica.gradient(part.shard, part.data, floats, record)

    @contextmanager
    def _swapped_in(self) -> Iterator[None]:
        """While open, the variables use this device's copies."""
        for variable, copy in zip(self._variables, self._copies, strict=True):
            variable._value = copy
        try:
            with keras.device(self._device):
                yield
        finally:
            for variable, own in zip(self._variables, self._own, strict=True):
                variable._value = own


def _copy_of(own: Any, device: Any) -> Any:
    copy = own.detach().to(device, copy=True)
    return torch.nn.Parameter(copy, requires_grad=own.requires_grad) if own.is_leaf else copy


def _device_of(model: Any) -> Any:
    return next((variable.value.device for variable in model.variables), None)


# Layers on chosen devices


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
