"""Spread one model over devices: its variables over a mesh, or its layers over devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from insitu.base.context import Context
from insitu.base.errors import InputError, TrainingError
from insitu.train.backends import active_backend, active_name
from insitu.train.custom_loop import LoopStep, RestorePlacementStep, StepModel
from insitu.train.devices import Device, resolve, resolve_all
from insitu.train.fit import StepExecutor
from insitu.train.replica import broadcast_state, read_state
from insitu.train.strategies.synchronous import SynchronousStrategy

_DATA, _MODEL = "data", "model"


class ModelParallelStrategy(SynchronousStrategy):
    """One model over many devices.

    On JAX variables, and the computation with them, are sharded over a mesh; rows are sharded over the mesh's
    first axis. The results are those of one device for the global batch, but for rounding:

        layout_map = {".*dense.*kernel": (None, "model")}
        strategy = insitu.ModelParallelStrategy(layout_map, mesh={"data": 2, "model": 4})

    With several workers the mesh is over the devices of all, joined by `jax.distributed`; each worker has as
    many whole rows of its first axis, so that the devices of one worker hold a whole variable. Make the
    strategy before JAX computes anything.

    In a custom loop the step of each worker is computed over its rows of the mesh, as one replica.

    On TensorFlow, JAX and PyTorch layers can be put on devices by name instead: see `place`.

    Args:
        layout_map: for each pattern of variables' paths a tuple with an axis of the mesh, or None, for each
            axis of the variable; or a `keras.distribution.LayoutMap`, with its own mesh. Variables that no
            pattern matches are copied to all devices. None: the largest axis of each kernel and embedding
            that can be divided is sharded over the axis "model".
        mesh: the mesh's axes and their sizes, first that of rows; one may be -1, which takes the rest.
            {"data": 1, "model": -1} by default, where 1 is the number of workers.
        devices: their names, the same on each worker; all of the best kind by default.
        context: who this process is; read from the environment by default.

    Raises:
        InputError: for devices that aren't there, a mesh or a layout map that doesn't fit.
        TrainingError: for a mesh or a layout map on another backend than JAX; if workers don't share the
            mesh's first axis evenly.

    Example:
        >>> strategy = insitu.ModelParallelStrategy()
        >>> strategy.place({"embedding": "cpu:0", "dense": "cpu:0"})
    """

    def __init__(
        self,
        layout_map: Any = None,
        *,
        mesh: Mapping[str, int] | None = None,
        devices: Sequence[str | Device] | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(context=context)
        self._placements: dict[str, Device] = {}
        self._names = devices
        self._mesh_arguments = (layout_map, mesh)
        self._mesh: Any = None
        uses_mesh = any(value is not None for value in (layout_map, mesh, devices))
        if uses_mesh and active_backend().meshes is None:
            raise TrainingError(
                "Sharding variables over a mesh needs the JAX backend of Keras. Received: the "
                f"{active_name()!r} backend. Put whole layers on devices by "
                "strategy.place({'layer': 'device'}), or set KERAS_BACKEND=jax before keras is imported."
            )
        if uses_mesh:
            self._make_mesh()

    def _make_mesh(self) -> Any:
        """Return (the sharding plan, the Keras distribution that makes variables here, the one over the whole
        mesh)."""
        if self._mesh is None:
            if len(self.membership.context.workers) > 1:
                active_backend().meshes.connect(self.membership)
            layout_map, mesh = self._mesh_arguments
            if isinstance(layout_map, keras.distribution.LayoutMap):
                if mesh is not None or self._names is not None:
                    raise InputError(
                        "A keras.distribution.LayoutMap has its own mesh. Received: such a map with "
                        f"mesh={mesh}, devices={self._names}. Leave these out."
                    )
                grid = layout_map.device_mesh.backend_mesh.devices
                axes: Sequence[str] = layout_map.device_mesh.axis_names
                layout_map = {pattern: layout_map[pattern].axes for pattern in layout_map}
            else:
                devices, axes, shape = self._mesh_of(mesh)
                grid = devices.reshape(shape)
            meshes = active_backend().meshes
            mesh_sharding = meshes.MeshSharding.from_devices(grid, tuple(axes))
            here, everywhere = (
                meshes.AutoSharding(part, layout_map) for part in (mesh_sharding.local, mesh_sharding.mesh)
            )
            self._mesh = (mesh_sharding, here, everywhere)
        return self._mesh

    def _mesh_of(self, mesh: Mapping[str, int] | None) -> tuple[Any, tuple[str, ...], tuple[int, ...]]:
        """Return (devices, names of axes, sizes of axes)."""
        devices = [device.handle() for device in resolve_all(self._names)]
        workers = max(1, len(self.membership.context.workers))
        if workers > 1:
            devices = active_backend().meshes.devices_like(devices)
        sizes = dict(mesh) if mesh is not None else {_DATA: workers, _MODEL: -1}
        return np.array(devices), tuple(sizes), resolve_mesh_sizes(sizes, len(devices))

    # Layers on devices

    def place(self, devices: Mapping[str, str | Device]) -> None:
        """Put layers on devices, by name: `strategy.place({"dense_1": "cpu:1"})`.

        Before the model is made. A layer's variables are on its device, and its computations in training,
        evaluation and prediction run there, gradients too; a layer within it goes with it, unless it has a
        place of its own. Other layers are on the default device. The model isn't compiled as one program
        then: TensorFlow's graph spans devices without XLA; on JAX each placed layer is a program.

        Raises InputError for a device that isn't there; when the model is made, for a layer that isn't.
        """
        if any(value is not None for value in (*self._mesh_arguments, self._names)):
            raise TrainingError(
                "A model is spread over a mesh or layer by layer. Received: place() on a strategy with a "
                "layout map, a mesh or devices."
            )
        if not devices:
            raise InputError("place() takes at least one layer and its device. Received: none.")
        self._placements.update({name: resolve(device) for name, device in devices.items()})

    # The interface of `Strategy`

    def placement(self) -> AbstractContextManager[Any]:
        if self._placements:
            from insitu.train.placement import place_new_variables

            return place_new_variables(self._placements)
        self._check_has_plan()
        scope: AbstractContextManager[Any] = self._make_mesh()[1].scope()
        return scope

    def _check_has_plan(self) -> None:
        if active_backend().meshes is None:
            raise TrainingError(
                "On this backend whole layers are placed on devices. Received: a strategy with 0 "
                "placed layers. Call strategy.place({'layer': 'device'}) before its scope."
            )

    @property
    def delegates_to_keras(self) -> bool:
        return False  # a model on several devices has steps of its own, also with one replica

    def configure_compiled(self, model: Any) -> None:
        if self._placements:
            model.jit_compile = False  # XLA's programs keep to one device

    def call_scope(self) -> AbstractContextManager[Any]:
        if self._placements:
            return super().call_scope()
        scope: AbstractContextManager[Any] = active_backend().meshes.without_distribution()
        return scope

    @property
    def _runs_one_program(self) -> bool:
        return not self._placements

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        if self._placements:
            from insitu.train.placement import PlacedLayersStep, place_layers

            placed = place_layers(model, self._placements)
            return PlacedLayersStep(super().make_step(model, example, first=first), placed)
        mesh_sharding, _, everywhere = self._make_mesh()
        if first and len(self.membership.context.workers) > 1:
            broadcast_state(read_state(model), self.membership.group(), model)
        meshes = active_backend().meshes
        step: StepExecutor = meshes.MeshStep(model, example, mesh_sharding, self.membership, everywhere.scope)
        return step

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        if self._placements:
            from insitu.train.placement import place_loop_layers

            model.jit_compile = False  # XLA's programs keep to one device
            restore = place_loop_layers(model, self.created_in_scope.layers, self._placements)
            return RestorePlacementStep(super().make_loop_step(model, example), restore)
        if len(self.membership.context.shards) != 1:
            raise TrainingError(
                "A mesh computes one shard for each worker in a custom loop. Received: the shards "
                f"{list(self.membership.context.shards)}. Use as many workers as shards."
            )
        meshes = active_backend().meshes
        mesh_sharding, here, _ = self._make_mesh()
        workers, axes = max(1, len(self.membership.context.workers)), mesh_sharding.mesh.axis_names
        over = meshes.plan_replica_axis(mesh_sharding.mesh.devices, workers, axes)
        step: LoopStep = meshes.MeshLoopStep(model, example, over, self.membership, here.scope)
        return step


def resolve_mesh_sizes(mesh: Mapping[str, int], devices: int) -> tuple[int, ...]:
    """Return the sizes of a mesh' axes over so many devices, with -1 replaced by the rest. Raises
    InputError."""
    sizes = list(mesh.values())
    known = int(np.prod([size for size in sizes if size != -1]))
    rest = devices // known if known > 0 else 0
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = rest
    if not sizes or any(size < 1 for size in sizes) or int(np.prod(sizes)) != devices:
        raise InputError(
            f"The sizes of a mesh' axes must multiply to the number of devices, {devices}; one may be -1. "
            f"Received: {dict(mesh)}"
        )
    return tuple(sizes)
