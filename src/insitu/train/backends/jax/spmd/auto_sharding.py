"""Choose which axis of a variable is sharded over which axis of a mesh."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from keras.distribution import DeviceMesh, LayoutMap, TensorLayout
from keras.src.distribution.distribution_lib import Distribution

from insitu.base.errors import InputError

Axes = tuple[str | None, ...]


class AutoSharding(Distribution):
    """A Keras distribution by a layout map, or by a rule of its own without one.

    A layout map has axes of the mesh for each axis of a variable, by a regular expression of the variable's
    path (or of a layer's output), as `keras.distribution.LayoutMap`. Other variables are copied to all
    devices. The rule without a map: the largest axis of a kernel or an embedding that can be divided, the
    last of several, is sharded over the mesh's second axis.

    Raises InputError, when a variable is made, for an axis that can't be divided or isn't there.
    """

    def __init__(self, mesh: Mesh, layout_map: Mapping[str, Axes] | None) -> None:
        devices = DeviceMesh(mesh.devices.shape, mesh.axis_names, mesh.devices.reshape(-1))
        super().__init__(devices, mesh.axis_names[0])
        self._sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        self._map: LayoutMap | None = None
        if layout_map is not None:
            self._map = LayoutMap(devices)
            for pattern, axes in layout_map.items():
                _check_pattern(pattern, axes, self._sizes)
                self._map[pattern] = TensorLayout(tuple(axes))

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        given = getattr(variable, "_layout", None)
        if given is not None:
            return given
        shape = tuple(variable.shape)
        if self._map is None:
            return TensorLayout(shard_largest_axis(shape, self._sizes), self.device_mesh)
        found = self._map[variable.path]
        if found is None:
            return TensorLayout((None,) * len(shape), self.device_mesh)
        check_divisible(variable.path, shape, found.axes, self._sizes)
        return found

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        return None if self._map is None else self._map[path]

    def get_data_layout(self, data_shape: tuple[int, ...]) -> TensorLayout:
        return TensorLayout((self.batch_dim_name, *(None,) * (len(data_shape) - 1)), self.device_mesh)


def shard_largest_axis(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Axes:
    """Return the mesh axes of a variable of `shape` by the rule without a map. `sizes` are those of the mesh'
    axes; the first shards rows, never variables."""
    axes: list[str | None] = [None] * len(shape)
    others = [name for name in list(sizes)[1:] if sizes[name] > 1]
    if len(shape) >= 2 and others:
        divisible = [index for index, length in enumerate(shape) if length and length % sizes[others[0]] == 0]
        if divisible:
            axes[max(divisible, key=lambda index: (shape[index], index))] = others[0]
    return tuple(axes)


def check_divisible(path: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]) -> None:
    """Raise InputError unless a variable of `shape` can be sharded by `axes`."""
    if len(axes) > len(shape):
        raise InputError(
            f"A layout names at most one axis of the mesh for each axis of the variable. Received: {axes} "
            f"for {path!r} of shape {shape}."
        )
    for index, name in enumerate(axes):
        if name is not None and shape[index] % sizes[name]:
            raise InputError(
                f"An axis of a variable must be divisible by the axis of the mesh that shards it. "
                f"Received: axis {index} of {path!r}, of shape {shape}, over {name!r} of size {sizes[name]}. "
                "Choose another axis or None for it in the layout map, or another mesh."
            )


def _check_pattern(pattern: str, axes: Any, sizes: Mapping[str, int]) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(
            f"A layout map's key is a regular expression. Received: {pattern!r}: {error}"
        ) from None
    if not isinstance(axes, tuple | list) or any(name is not None and name not in sizes for name in axes):
        raise InputError(
            f"A layout map's value is a tuple of None and axes of the mesh ({', '.join(map(repr, sizes))}). "
            f"Received: {axes!r} for {pattern!r}"
        )
