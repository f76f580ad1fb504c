"""Make the step of a model that is one program over a mesh of JAX devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from insitu.errors import TrainingError

if TYPE_CHECKING:
    from insitu.train.elastic import Membership
    from insitu.train.fit import StepExecutor


def make_mesh_step(model: Any, example: Any, devices: Sequence[Any], membership: Membership) -> StepExecutor:
    """Return the step of `model`, built and compiled, as one program over `devices`.

    `devices` are `jax.Device`s: all of this process or, after `jax.distributed` has been set up, of all
    tasks, each with the same number. Each device has a copy of the variables, the rows of the global batch
    are sharded, and XLA inserts the collectives.

    The results are those of one device for the same global batch, but for rounding (about 1e-5 relative):
    BatchNorm sees the global batch, Dropout draws the same mask, a loss is the mean over the global batch.
    The number of rows is free; each row counts once, with the same weight.

    Raises TrainingError where another backend than JAX is active, or the job has several tasks and the
    devices are of one.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise TrainingError(
            "A mesh of devices needs the JAX backend of Keras. Received: the "
            f"{keras.backend.backend()!r} backend. Set KERAS_BACKEND=jax before keras is imported."
        )
    import numpy as np

    from insitu.train.spmd.mesh_sharding import DATA_AXIS, MeshSharding
    from insitu.train.spmd.program import MeshStep

    return MeshStep(model, example, MeshSharding.from_devices(np.array(devices), (DATA_AXIS,)), membership)
