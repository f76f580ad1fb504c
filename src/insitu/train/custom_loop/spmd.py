"""A custom loop's step over a mesh of JAX devices: a part of the mesh for each replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.train.collectives import by_shard
from insitu.train.custom_loop.program import StepModel
from insitu.train.custom_loop.steps import Outputs
from insitu.train.elastic import Membership
from insitu.train.replica import Part, seed_offset
from insitu.train.replica.jax import JaxReplica
from insitu.train.spmd.layout import DATA_AXIS, MeshLayout
from insitu.train.spmd.lost_peers import naming_lost_peers
from insitu.train.spmd.variables import OTHERS, TRAINABLE, variables_over

REPLICA_AXIS = "replica"
Arrays = list[Any]
Tracing = Callable[[], contextlib.AbstractContextManager[Any]]


def replica_layout(devices: NDArray[Any], replicas: int, axes: Sequence[str] = (DATA_AXIS,)) -> MeshLayout:
    """A layout that gives each of so many replicas as many rows of `devices`, an array with a dimension for
    each of `axes`."""
    return MeshLayout.over(devices.reshape(replicas, -1, *devices.shape[1:]), (REPLICA_AXIS, *axes))


class MeshLoopStep(JaxReplica):
    """A `LoopStep` over a mesh whose first axis is that of replicas.

    What a replica computes is a program over its own part of the mesh, on which its rows are spread and
    variables lie as their layout says: so replicas may have different numbers of rows, and all are under way
    before one is waited for. The sum of their gradients and the update are one program over the whole mesh,
    with XLA's collectives. Records, which are small, go over the exchange.
    """

    def __init__(
        self,
        model: StepModel,
        example: list[Any],
        layout: MeshLayout,
        membership: Membership,
        tracing: Tracing = contextlib.nullcontext,
    ) -> None:
        """`tracing` is open while the user's step is traced."""
        with _without_distribution():
            super().__init__(model, example)
        self._without_gradient = model.without_gradient
        self._step, self._layout, self._tracing = model, layout, tracing
        self._held = variables_over(model, layout)
        self._group = membership.group()
        self._alone = len(membership.context.workers) <= 1
        specs = self._specs()
        self._sites = [_Site(devices, layout, *specs) for devices in layout.local.devices]
        self._over_all = [
            [NamedSharding(layout.mesh, PartitionSpec(REPLICA_AXIS, *spec)) for spec in group]
            for group in specs
        ]
        self._programs = [self._program(site) for site in self._sites]
        self._update_all = jax.jit(
            self._trace_update_all, out_shardings=tuple(self._held.shardings), donate_argnums=0
        )
        self._records = np.zeros((len(self._sites), self.train_record_size))
        self._place_of_shard = self._find_places(membership)

    def _specs(self) -> tuple[list[Any], list[Any]]:
        """How the trainable variables, and the state that is averaged, lie on the mesh."""
        by_variable = {
            id(v): sharding.spec
            for group in (TRAINABLE, OTHERS)
            for v, sharding in zip(self._variables[group], self._held.shardings[group], strict=True)
        }
        state = self._state
        return [by_variable[id(v)] for v in state.trainable], [by_variable[id(v)] for v in state.mean]

    def _program(self, site: _Site) -> Callable[..., Any]:
        shardings = (None, None, *site.shardings) if site.several else None
        program: Callable[..., Any] = jax.jit(self._trace_replica, static_argnums=3, out_shardings=shardings)
        return program

    def _find_places(self, membership: Membership) -> list[int]:
        """For each shard its place on the axis of replicas. Collective."""
        if self._alone:
            return list(range(len(self._sites)))
        mine = np.array([[membership.context.index]], np.int64)
        return [int(place) for place in self._group.all_gather(by_shard(mine)).ravel()]

    # LoopStep

    def run(self, parts: Sequence[Part]) -> Outputs:
        """See `LoopStep`."""
        state = tuple(self._held.take(group) for group in range(len(self._variables)))
        started = [self._start(index, part, state) if part.rows else None for index, part in enumerate(parts)]
        if self._step.changes_anything:
            self._finish(parts, started, state)
        return [None if results is None else results[1] for results in started]

    def _start(self, index: int, part: Part, state: tuple[Arrays, ...]) -> Any:
        site = self._sites[index]
        views = tuple([site.view(value) for value in group] for group in state)
        leaves, cuts = zip(*[site.place(leaf, part.rows) for leaf in part.data], strict=True)
        return self._programs[index](views, np.uint32(seed_offset(part.shard)), list(leaves), cuts)

    def _finish(self, parts: Sequence[Part], started: Sequence[Any], state: tuple[Arrays, ...]) -> None:
        """The update by what all replicas have computed."""
        self._records[:] = 0
        for record, part, results in zip(self._records, parts, started, strict=True):
            if results is not None:
                self._fill(record, self._train_packing, results[0], part.rows)
        records = self._records if self._alone else self._group.all_gather(by_shard(self._records))
        if not records[:, 0].any():
            raise TrainingError("A step must have at least one row over all shards. Received: none.")
        shares = np.zeros(len(records), np.float32)
        shares[self._place_of_shard] = records[:, 0] / records[:, 0].sum()
        packed = self._train_packing.split(self._train_record.combine(records))
        gradients, means = (self._stacked(started, kind) for kind in (0, 1))
        # Their memory is given to the program.
        started = ()
        with naming_lost_peers(None if self._alone else self._group):
            new = self._update_all(state, packed, gradients, means, shares)
            if not self._alone:
                jax.block_until_ready(new)
        for group, values in enumerate(new):
            self._held.put(group, values)

    def _stacked(self, started: Sequence[Any], kind: int) -> Arrays:
        """Gradients (0) or averaged state (1) of all replicas, as arrays over the whole mesh whose first axis
        is that of replicas."""
        found = [
            self._zeros(site, kind) if results is None else results[2 + kind]
            for site, results in zip(self._sites, started, strict=True)
        ]
        return [
            self._stack([own[index] for own in found], sharding)
            for index, sharding in enumerate(self._over_all[kind])
        ]

    def _stack(self, pieces: Sequence[Any], sharding: NamedSharding) -> Any:
        shape = (self._layout.mesh.devices.shape[0], *pieces[0].shape[1:])
        arrays = [shard.data for piece in pieces for shard in piece.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _zeros(self, site: _Site, kind: int) -> Arrays:
        """What a replica without rows adds."""
        variables = (self._state.trainable, self._state.mean)[kind]
        return [
            jax.device_put(np.zeros((1, *v.shape), self.floats_dtype), sharding)
            for v, sharding in zip(variables, site.shardings[kind], strict=True)
        ]

    # What is traced

    def _trace_replica(self, state: Any, offset: Any, leaves: Arrays, cuts: Sequence[int | None]) -> Any:
        arrays = [leaf if rows is None else leaf[:rows] for leaf, rows in zip(leaves, cuts, strict=True)]
        with self._tracing():
            after, _, gradients, means = self._trace_parts(state, offset, arrays)
        gradients, means = (
            [value.astype(self.floats_dtype)[None] for value in values] for values in (gradients, means)
        )
        return self._train_packing.pack(after), list(self._step.outputs), gradients, means

    def _trace_update_all(
        self, state: Any, packed: Mapping[str, Any], gradients: Arrays, means: Arrays, shares: Any
    ) -> Any:
        trainable, others, optimizer, metrics = state
        others, metrics = self._with_state(others, metrics, packed, [_mean(m, shares) for m in means])
        gradients = [_mean(gradient, shares) for gradient in gradients]
        trainable, optimizer = self._update(trainable, optimizer, gradients)
        return trainable, others, optimizer, metrics


class _Site:
    """The part of the mesh that one replica of this process has. `devices` have a dimension for each axis of
    the mesh but that of replicas."""

    def __init__(self, devices: NDArray[Any], layout: MeshLayout, *specs: Sequence[Any]) -> None:
        self.mesh = Mesh(devices, layout.mesh.axis_names[1:])
        self.several = devices.size > 1
        self._rows = int(devices.shape[0])
        self._devices = set(devices.ravel())
        self._device = devices.ravel()[0]
        self.shardings = tuple(
            [NamedSharding(self.mesh, PartitionSpec(None, *spec)) for spec in group] for group in specs
        )

    def view(self, value: jax.Array) -> jax.Array:
        """An array of the whole mesh as this replica has it, without a copy."""
        pieces = [shard.data for shard in value.addressable_shards if shard.device in self._devices]
        if not self.several:
            return pieces[0]
        spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else PartitionSpec()
        return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(self.mesh, spec), pieces)

    def place(self, leaf: Any, rows: int) -> tuple[Any, int | None]:
        """(an argument where it is needed, its rows spread if it has those of the batch; how many rows it
        has, where it was filled up)."""
        array = np.asarray(leaf)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        if not self.several:
            return jax.device_put(array, self._device), None
        if len(array) != rows:
            return jax.device_put(array, NamedSharding(self.mesh, PartitionSpec())), None
        more = -rows % self._rows
        if more:
            array = np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
        by_rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names[0]))
        return jax.device_put(array, by_rows), rows if more else None


def _mean(stacked: Any, shares: Any) -> Any:
    """The mean over replicas by rows; what is computed without any doesn't count, whatever it is."""
    shares = shares.reshape(-1, *[1] * (stacked.ndim - 1)).astype(stacked.dtype)
    return jnp.where(shares > 0, stacked * shares, 0).sum(0)


@contextlib.contextmanager
def _without_distribution() -> Iterator[None]:
    outer = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(outer)
