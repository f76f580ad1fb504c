"""A mesh of JAX devices, of one process or of all tasks of a job, and how arrays are sharded over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from insitu.base.errors import TrainingError

DATA_AXIS = "data"
"""The mesh axis that shards the rows of a batch."""


@dataclass(frozen=True, slots=True)
class MeshSharding:
    """A mesh whose first axis shards rows; the others, if any, shard variables.

    Tasks follow each other on the first axis and have as many devices.
    """

    mesh: Mesh
    """The program's mesh, over the devices of all tasks."""
    local: Mesh
    """This process' part of it: the same object if there is one process."""

    @classmethod
    def from_devices(cls, devices: NDArray[Any], axes: Sequence[str]) -> MeshSharding:
        """Return the sharding over an array of devices with one dimension for each of `axes`. Raises
        TrainingError if tasks don't share the first axis evenly."""
        mesh = Mesh(devices, tuple(axes))
        processes = [
            sorted({device.process_index for device in row}) for row in devices.reshape(len(devices), -1)
        ]
        here = jax.process_index()
        own = [index for index, row in enumerate(processes) if row == [here]]
        tasks = {index for row in processes for index in row}
        if any(len(row) != 1 for row in processes) or len(own) * len(tasks) != len(devices):
            raise TrainingError(
                f"Each task must have the same number of whole rows of the mesh's first axis, {axes[0]!r}: "
                "the devices of one task hold a whole variable. Received: a mesh of "
                f"{' x '.join(map(str, devices.shape))} devices over {len(tasks)} tasks."
            )
        return cls(mesh, Mesh(devices[own[0] : own[-1] + 1], tuple(axes)) if len(tasks) > 1 else mesh)

    @property
    def spans_processes(self) -> bool:
        return self.mesh is not self.local

    @property
    def local_rows(self) -> int:
        """The devices of this process on the first axis."""
        return int(self.local.devices.shape[0])

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names[0]))

    def sharding_of(self, value: jax.Array) -> NamedSharding:
        """Return the sharding of a variable in the program: its present one, if the mesh has those axes, else
        a copy on each device."""
        held = value.sharding
        if isinstance(held, NamedSharding) and all(
            held.mesh.shape[name] == self.mesh.shape.get(name) for name in _names_in(held.spec)
        ):
            return NamedSharding(self.mesh, held.spec)
        return self.replicated

    def place(self, value: Any, sharding: NamedSharding) -> jax.Array:
        """Return `value`, the same in each process, as an array of the program, in memory of its own. The
        program may donate it, and others may hold `value` (an optimizer assigns one value to two
        variables)."""
        here = NamedSharding(self.local, sharding.spec)
        local: jax.Array = jax.device_put(value, here, may_alias=False)
        if not self.spans_processes:
            return local
        pieces = [shard.data for shard in local.addressable_shards]
        return jax.make_array_from_single_device_arrays(local.shape, sharding, pieces)

    def view(self, value: jax.Array) -> jax.Array:
        """Return an array of the program as this process sees it: whole, on its own devices, without a
        copy."""
        if not self.spans_processes:
            return value
        if self.local.size == 1:
            return value.addressable_data(0)
        spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else PartitionSpec()
        pieces = [shard.data for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(self.local, spec), pieces)

    def shard_rows(self, rows: NDArray[Any], length: int, total: int) -> jax.Array:
        """Return this process' `rows`, padded to `length`, as its part of a global array of `total` rows."""
        if len(rows) < length:
            filled = np.zeros((length, *rows.shape[1:]), rows.dtype)
            filled[: len(rows)] = rows
            rows = filled
        if not self.spans_processes:
            return jax.device_put(rows, self.batch_sharding)
        return jax.make_array_from_process_local_data(self.batch_sharding, rows, (total, *rows.shape[1:]))


def _names_in(spec: PartitionSpec) -> set[str]:
    """Return the axes of a mesh in a partition spec."""
    names = {name for axis in spec for name in (axis if isinstance(axis, tuple) else (axis,))}
    return {name for name in names if name is not None}
