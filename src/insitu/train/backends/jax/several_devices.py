"""A model's replicas on several JAX devices that read one copy of the variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax._src.array import ArrayImpl
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from numpy.typing import NDArray

from insitu.train.backends.jax.replica import JaxReplica
from insitu.train.devices import Device
from insitu.train.placement import Placements, find_device
from insitu.train.replica import CombinationPlan, ShardBatch


class JaxMultiDeviceReplica(JaxReplica):
    """Variables stay where they are; each step sends them to the devices, which compute at the same time."""

    def __init__(
        self,
        model: Any,
        data: Any,
        devices: Sequence[Any],
        shards: Sequence[int],
        home: Any,
        plan: CombinationPlan | None = None,
    ) -> None:
        del shards  # each part has its own
        super().__init__(model, data, plan)
        self._devices = tuple(devices)
        self._home = home or self._devices[0]

    def gradients(
        self, parts: Sequence[ShardBatch], floats: NDArray[Any], records: NDArray[np.float64]
    ) -> None:
        """See `MultiDeviceReplica`."""
        started = []
        for index, (device, part) in enumerate(zip(self._devices, parts, strict=True)):
            if part.rows:
                # A computation returns before it is done: all are under way before one is waited for.
                with jax.default_device(device):
                    started.append((index, self.start_gradient(part.shard, part.data)))
        for index, computation in started:
            self.finish_gradient(computation, floats[index], records[index])

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Any:
        with jax.default_device(self._home):
            return super().apply(floats, records)


# Layers on chosen devices


class JaxDeviceMover:
    """See `DeviceMover`."""

    def is_on(self, variable: Any, device: Device) -> bool:
        value = variable.value
        return value.devices() == {device.handle()} and not value.committed

    def move(self, variable: Any, device: Device) -> bool:
        variable._direct_assign(uncommit(jax.device_put(variable.value, device.handle())))
        return True

    def wrap(self, layer: Any, device: Device) -> None:
        object.__setattr__(layer, "call", _PlacedCall(layer, device))

    def prepare(self, model: Any, optimizers: Sequence[Any], placements: Placements) -> None:
        """Compute updates where the variable is."""
        for optimizer in optimizers:
            if "update_step" not in vars(optimizer):
                _update_in_place(optimizer, placements)


def _update_in_place(optimizer: Any, placements: Placements) -> None:
    update_step = optimizer.update_step

    @functools.wraps(update_step)
    def there(gradient: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        device = find_device(variable.path, placements)
        with jax.default_device(device.handle() if device is not None else None):
            return update_step(gradient, variable, *args, **kwargs)

    object.__setattr__(optimizer, "update_step", there)


class _PlacedCall:
    """The `call` of a placed layer, with its signature."""

    def __init__(self, layer: Any, device: Device) -> None:
        self._layer = layer
        self._call = layer.call
        self._device = device.handle()
        self._home = jax.local_devices()[0]
        self._programs: dict[Any, Callable[..., Any]] = {}
        functools.update_wrapper(self, self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = keras.tree.flatten((args, kwargs))
        if not in_stateless_scope() or any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
            return self._call(*args, **kwargs)
        scope = get_stateless_scope()
        variables = self._layer.variables
        moving = [_to_device(leaf, self._device, self._home) for leaf in leaves if _is_array(leaf)]
        values = [_to_device(v.value, self._device, None) for v in variables]
        outputs, updates, losses = self._program(args, kwargs, leaves)(values, moving)
        for index, value in updates.items():
            scope.add_update((variables[index], _to_home(value, self._home, self._device)))
        if scope.collect_losses:
            for loss in losses:
                scope.add_loss(_to_home(loss, self._home, self._device))
        return keras.tree.map_structure(lambda leaf: _to_home(leaf, self._home, self._device), outputs)

    def _program(self, args: Any, kwargs: Any, leaves: list[Any]) -> Callable[..., Any]:
        """Return the compiled call for arguments of this structure. Leaves that aren't arrays are its
        constants."""
        constants = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
        key = (repr(keras.tree.map_structure(lambda leaf: None, (args, kwargs))), repr(constants))
        if key not in self._programs:
            self._programs[key] = jax.jit(functools.partial(self._trace, (args, kwargs), constants))
        return self._programs[key]

    def _trace(self, structure: Any, constants: tuple[Any, ...], values: Any, moving: Any) -> Any:
        arrays = iter(moving)
        filled = [next(arrays) if _is_array(leaf) else leaf for leaf in keras.tree.flatten(structure)]
        args, kwargs = keras.tree.pack_sequence_as(structure, filled)
        variables = self._layer.variables
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = self._call(*args, **kwargs)
        updates: Mapping[int, Any] = {
            index: scope.get_current_value(variable)
            for index, (variable, value) in enumerate(mapping)
            if scope.get_current_value(variable) is not value
        }
        return outputs, updates, list(scope.losses)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def uncommit(array: Any) -> Any:
    """Return the same array, free to be moved to any device. A traced value is returned as it is."""
    if isinstance(array, jax.core.Tracer):
        return array
    return ArrayImpl(array.aval, array.sharding, array._arrays, committed=False)


# Moving there and back, for values and, the other way round, for gradients. `back` None: where it is made.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _floats_to_device(value: Any, to: Any, back: Any) -> Any:
    return jax.device_put(value, to)


def _to_device_backward(to: Any, back: Any, _: None, cotangent: Any) -> tuple[Any]:
    return (uncommit(cotangent if back is None else jax.device_put(cotangent, back)),)


_floats_to_device.defvjp(lambda value, to, back: (jax.device_put(value, to), None), _to_device_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _floats_to_home(value: Any, to: Any, back: Any) -> Any:
    return uncommit(jax.device_put(value, to))


def _to_home_backward(to: Any, back: Any, _: None, cotangent: Any) -> tuple[Any]:
    return (jax.device_put(cotangent, back),)


_floats_to_home.defvjp(lambda value, to, back: (_floats_to_home(value, to, back), None), _to_home_backward)


def _to_device(value: Any, to: Any, back: Any) -> Any:
    """Move `value` to the device of a layer, and commit it to it."""
    return _floats_to_device(value, to, back) if _is_float(value) else jax.device_put(value, to)


def _to_home(value: Any, to: Any, back: Any) -> Any:
    """Move a layer's output back home, uncommitted."""
    return _floats_to_home(value, to, back) if _is_float(value) else uncommit(jax.device_put(value, to))


def _is_float(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.floating))
