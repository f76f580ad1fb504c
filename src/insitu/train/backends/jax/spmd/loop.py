"""A custom loop's step over a mesh of JAX devices: each replica has a part of the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.backends.jax.replica import JaxReplica
from insitu.train.backends.jax.spmd import without_distribution
from insitu.train.backends.jax.spmd.mesh_sharding import DATA_AXIS, MeshSharding
from insitu.train.backends.jax.spmd.program import report_lost_peers
from insitu.train.backends.jax.spmd.variables import OTHERS, TRAINABLE, get_mesh_variables
from insitu.train.collectives import squeeze_shards
from insitu.train.custom_loop import Outputs, StepModel
from insitu.train.elastic import Membership
from insitu.train.replica import ShardBatch, seed_offset

REPLICA_AXIS = "replica"
Arrays = list[Any]
TraceScope = Callable[[], contextlib.AbstractContextManager[Any]]


def plan_replica_axis(
    devices: NDArray[Any], replicas: int, axes: Sequence[str] = (DATA_AXIS,)
) -> MeshSharding:
    """Return a mesh that gives each of `replicas` replicas as many rows of `devices`, an array with a
    dimension for each of `axes`."""
    return MeshSharding.from_devices(devices.reshape(replicas, -1, *devices.shape[1:]), (REPLICA_AXIS, *axes))


class MeshLoopStep(JaxReplica):
    """A `LoopStep` over a mesh whose first axis is that of replicas.

    Each replica is a program over its own part of the mesh: its rows and its variables are sharded over that
    part. So replicas may have different numbers of rows, and all are started before one is waited for. The
    sum of their gradients and the update are one program over the whole mesh, with XLA's collectives.
    Records, which are small, go over the exchange.
    """

    def __init__(
        self,
        model: StepModel,
        example: list[Any],
        mesh_sharding: MeshSharding,
        membership: Membership,
        trace_scope: TraceScope = contextlib.nullcontext,
    ) -> None:
        """Open `trace_scope` whenever the user's step is traced."""
        with without_distribution():
            super().__init__(model, example)
        self._without_gradient = model.without_gradient
        self._step, self._mesh_sharding, self._trace_scope = model, mesh_sharding, trace_scope
        self._mesh_variables = get_mesh_variables(model, mesh_sharding)
        self._group = membership.group()
        self._alone = len(membership.context.workers) <= 1
        specs = self._specs()
        self._submeshes = [
            _ReplicaSubmesh(devices, mesh_sharding, *specs) for devices in mesh_sharding.local.devices
        ]
        self._over_all = [
            [NamedSharding(mesh_sharding.mesh, PartitionSpec(REPLICA_AXIS, *spec)) for spec in group]
            for group in specs
        ]
        self._programs = [self._program(submesh) for submesh in self._submeshes]
        self._update_all = jax.jit(
            self._trace_update_all, out_shardings=tuple(self._mesh_variables.shardings), donate_argnums=0
        )
        self._records = np.zeros((len(self._submeshes), self.train_record_size))
        self._axis_index_of_shard = self._find_axis_indices(membership)

    def _specs(self) -> tuple[list[Any], list[Any]]:
        """Return how the trainable variables, and the state that is averaged, are sharded over the mesh."""
        by_variable = {
            id(v): sharding.spec
            for group in (TRAINABLE, OTHERS)
            for v, sharding in zip(self._variables[group], self._mesh_variables.shardings[group], strict=True)
        }
        state = self._state
        return [by_variable[id(v)] for v in state.trainable], [by_variable[id(v)] for v in state.mean]

    def _program(self, submesh: _ReplicaSubmesh) -> Callable[..., Any]:
        shardings = (None, None, *submesh.shardings) if submesh.several else None
        program: Callable[..., Any] = jax.jit(self._trace_replica, static_argnums=3, out_shardings=shardings)
        return program

    def _find_axis_indices(self, membership: Membership) -> list[int]:
        """Return each shard's index on the axis of replicas. Collective."""
        if self._alone:
            return list(range(len(self._submeshes)))
        own = np.array([[membership.context.index]], np.int64)
        return [int(index) for index in self._group.all_gather(squeeze_shards(own)).ravel()]

    # LoopStep

    def run(self, parts: Sequence[ShardBatch]) -> Outputs:
        """See `LoopStep`."""
        state = tuple(self._mesh_variables.take(group) for group in range(len(self._variables)))
        started = [self._start(index, part, state) if part.rows else None for index, part in enumerate(parts)]
        if self._step.changes_anything:
            self._apply_results(parts, started, state)
        return [None if results is None else results[1] for results in started]

    def _start(self, index: int, part: ShardBatch, state: tuple[Arrays, ...]) -> Any:
        submesh = self._submeshes[index]
        views = tuple([submesh.view(value) for value in group] for group in state)
        leaves, cuts = zip(*[submesh.place(leaf, part.rows) for leaf in part.data], strict=True)
        return self._programs[index](views, np.uint32(seed_offset(part.shard)), list(leaves), cuts)

    def _apply_results(
        self, parts: Sequence[ShardBatch], started: Sequence[Any], state: tuple[Arrays, ...]
    ) -> None:
        """Update the variables by the results of all replicas."""
        self._records[:] = 0
        for record, part, results in zip(self._records, parts, started, strict=True):
            if results is not None:
                self._fill(record, self._train_packer, results[0], (), part.rows)
        records = self._records if self._alone else self._group.all_gather(squeeze_shards(self._records))
        if not records[:, 0].any():
            raise TrainingError(
                "A step needs at least one row over all shards. Received: 0 rows. Leave out empty batches."
            )
        shares = np.zeros(len(records), np.float32)
        shares[self._axis_index_of_shard] = records[:, 0] / records[:, 0].sum()
        packed = self._train_packer.split(self._train_record.combine(records))
        gradients, means = (self._stacked(started, kind) for kind in (0, 1))
        # Drop the references: their memory is donated to the program.
        started = ()
        with report_lost_peers(None if self._alone else self._group):
            new = self._update_all(state, packed, gradients, means, shares)
            if not self._alone:
                jax.block_until_ready(new)
        for group, values in enumerate(new):
            self._mesh_variables.put(group, values)

    def _stacked(self, started: Sequence[Any], kind: int) -> Arrays:
        """Return gradients (0) or averaged state (1) of all replicas, as arrays over the whole mesh whose
        first axis is that of replicas."""
        found = [
            self._zeros(submesh, kind) if results is None else results[2 + kind]
            for submesh, results in zip(self._submeshes, started, strict=True)
        ]
        return [
            self._stack([own[index] for own in found], sharding)
            for index, sharding in enumerate(self._over_all[kind])
        ]

    def _stack(self, pieces: Sequence[Any], sharding: NamedSharding) -> Any:
        shape = (self._mesh_sharding.mesh.devices.shape[0], *pieces[0].shape[1:])
        arrays = [shard.data for piece in pieces for shard in piece.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _zeros(self, submesh: _ReplicaSubmesh, kind: int) -> Arrays:
        """Return the contribution of a replica without rows."""
        variables = (self._state.trainable, self._state.mean)[kind]
        return [
            jax.device_put(np.zeros((1, *v.shape), self.floats_dtype), sharding)
            for v, sharding in zip(variables, submesh.shardings[kind], strict=True)
        ]

    # Traced functions

    def _trace_replica(self, state: Any, offset: Any, leaves: Arrays, cuts: Sequence[int | None]) -> Any:
        arrays = [leaf if rows is None else leaf[:rows] for leaf, rows in zip(leaves, cuts, strict=True)]
        with self._trace_scope():
            after, _, gradients, means = self._trace_parts(state, offset, arrays)
        gradients, means = (
            [value.astype(self.floats_dtype)[None] for value in values] for values in (gradients, means)
        )
        return self._train_packer.pack(after), list(self._step.outputs), gradients, means

    def _trace_update_all(
        self, state: Any, packed: Mapping[str, Any], gradients: Arrays, means: Arrays, shares: Any
    ) -> Any:
        trainable, others, optimizer, metrics = state
        others, metrics = self._with_state(others, metrics, packed, [_mean(m, shares) for m in means])
        gradients = [_mean(gradient, shares) for gradient in gradients]
        trainable, optimizer = self._update(trainable, optimizer, gradients)
        return trainable, others, optimizer, metrics


class _ReplicaSubmesh:
    """The part of the mesh that one replica of this process has. `devices` have a dimension for each axis of
    the mesh but that of replicas."""

    def __init__(self, devices: NDArray[Any], mesh_sharding: MeshSharding, *specs: Sequence[Any]) -> None:
        self.mesh = Mesh(devices, mesh_sharding.mesh.axis_names[1:])
        self.several = devices.size > 1
        self._rows = int(devices.shape[0])
        self._devices = set(devices.ravel())
        self._device = devices.ravel()[0]
        self.shardings = tuple(
            [NamedSharding(self.mesh, PartitionSpec(None, *spec)) for spec in group] for group in specs
        )

    def view(self, value: jax.Array) -> jax.Array:
        """Return an array of the whole mesh as this replica has it, without a copy."""
        pieces = [shard.data for shard in value.addressable_shards if shard.device in self._devices]
        if not self.several:
            return pieces[0]
        spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else PartitionSpec()
        return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(self.mesh, spec), pieces)

    def place(self, leaf: Any, rows: int) -> tuple[Any, int | None]:
        """Return (the argument on this part of the mesh, the number of its rows if padding was added). An
        argument with the rows of the batch is sharded by them."""
        array = np.asarray(leaf)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        if not self.several:
            return jax.device_put(array, self._device), None
        if len(array) != rows:
            return jax.device_put(array, NamedSharding(self.mesh, PartitionSpec())), None
        more = -rows % self._rows
        if more:
            array = np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
        batch_sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names[0]))
        return jax.device_put(array, batch_sharding), rows if more else None


def _mean(stacked: Any, shares: Any) -> Any:
    """Return the mean over replicas by rows. The values of replicas without rows don't count."""
    shares = shares.reshape(-1, *[1] * (stacked.ndim - 1)).astype(stacked.dtype)
    return jnp.where(shares > 0, stacked * shares, 0).sum(0)
