"""Makes the step of a model that is one program over a mesh of JAX devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from insitu.errors import TrainingError

if TYPE_CHECKING:
    from insitu.train.elastic import Membership
    from insitu.train.fit import StepExecutor


def make_mesh_step(model: Any, example: Any, devices: Sequence[Any], membership: Membership) -> StepExecutor:
    """The step of `model`, built and compiled, as one program over `devices`.

    `devices` are `jax.Device`s: all of this process or, after `jax.distributed` has been set up, of all
    tasks, each with as many. Variables are copied to each of them, the rows of the global batch are spread,
    and XLA puts in the collectives.

    What comes out is what one device gives for the same global batch, but for rounding (about 1e-5
    relative): BatchNorm sees the global batch, Dropout draws the same mask, a loss means what it says. Any
    number of rows will do; each counts once, with the same weight.

    Raises TrainingError where another backend than JAX is active, or the job has several tasks and the
    devices are of one.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise TrainingError(
            "A mesh of devices is there on the JAX backend of Keras. Received: the "
            f"{keras.backend.backend()!r} backend."
        )
    import numpy as np

    from insitu.train.spmd.layout import DATA_AXIS, MeshLayout
    from insitu.train.spmd.program import MeshStep

    return MeshStep(model, example, MeshLayout.over(np.array(devices), (DATA_AXIS,)), membership)
