"""Synchronous training as one program over a mesh of JAX devices.

Begin reading with `program.py`.
"""

from insitu.train.backends.jax.spmd.program import make_mesh_step, without_distribution
