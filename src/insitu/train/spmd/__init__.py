"""Synchronous training as one program over a mesh of JAX devices.

Begin reading with `mesh_step.py`, then `program.py`.
"""

from insitu.train.spmd.distribution import without_distribution
from insitu.train.spmd.mesh_step import make_mesh_step

__all__ = [
    "make_mesh_step",
    "without_distribution",
]
