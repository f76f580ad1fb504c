"""Synchronous training as one program over a mesh of JAX devices.

Begin reading with `program.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.train.backends.jax.spmd.auto_sharding import AutoSharding
    from insitu.train.backends.jax.spmd.distributed import (
        all_devices,
        backend_started,
        connect,
        devices_like,
        visible_accelerators,
    )
    from insitu.train.backends.jax.spmd.loop import MeshLoopStep, plan_replica_axis
    from insitu.train.backends.jax.spmd.mesh_sharding import MeshSharding
    from insitu.train.backends.jax.spmd.program import MeshStep, make_mesh_step, without_distribution

__getattr__, __dir__ = export_lazily(__name__)
