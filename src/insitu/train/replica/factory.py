"""Make the replicas of the active Keras backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.config import BACKENDS
from insitu.base.errors import TrainingError
from insitu.base.process.preload_hooks import register_preload
from insitu.train.replica.fused import FusedReplica
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.protocol import Logs, Replica

# Preload Keras and the backend in a standby process: train a tiny model once, so that they load what they
# load on first use. No trace is left: the numbers in layers' names are reset, and random numbers come from
# seeds


_ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel[0-9]*")


def has_accelerators(devices: Path = Path("/dev")) -> bool:
    """Return True if a first operation might take memory of a device that the job's tasks need."""
    return any(True for pattern in _ACCELERATORS for _ in devices.glob(pattern))


def warm_up() -> None:
    import keras
    from keras.src.backend.common import global_state

    if has_accelerators():
        return
    counted = global_state.get_global_attribute("object_name_uids")
    names: dict[str, int] = defaultdict(int) if counted is None else counted.copy()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((1, 1), "float32"), np.zeros((1, 1), "float32"))
    global_state.set_global_attribute("object_name_uids", names)


register_preload(warm_up)


def make_replica(model: Any, data: Any, plan: CombinationPlan | None = None) -> Replica:
    """Return a replica of `model` on the active Keras backend.

    `data` is a batch, for its structure and dtypes; `plan` says how steps combine. Raises TrainingError for a
    backend without replicas.
    """
    backend = _active_backend()
    if backend == "tensorflow":
        from insitu.train.backends.tensorflow.replica import TensorFlowReplica

        return TensorFlowReplica(model, data, plan)
    if backend == "jax":
        from insitu.train.backends.jax.replica import JaxReplica

        return JaxReplica(model, data, plan)
    from insitu.train.backends.torch.replica import TorchReplica

    return TorchReplica(model, data, plan)


def make_fused_replica(model: Any, data: Any) -> FusedReplica:
    """Do as `make_replica` for a replica without peers."""
    backend = _active_backend()
    if backend == "tensorflow":
        from insitu.train.backends.tensorflow.replica import FusedTensorFlow

        return FusedTensorFlow(model, data)
    if backend == "jax":
        from insitu.train.backends.jax.replica import FusedJax

        return FusedJax(model, data)
    from insitu.train.backends.torch.replica import FusedTorch

    return FusedTorch(model, data)


def add_up_repeated_rows(model: Any) -> AbstractContextManager[None]:
    """Return a scope in which Keras' own steps of `model` give each row of a sparse gradient to the optimizer
    once, as replicas do. Only TensorFlow has sparse gradients."""
    import keras

    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    from insitu.train.backends.tensorflow import replica

    return replica.add_up_repeated_rows(model)


def _active_backend() -> str:
    import keras

    backend: str = keras.backend.backend()
    if backend not in BACKENDS:
        raise TrainingError(
            "A strategy runs on the TensorFlow, JAX and PyTorch backends of Keras. Received: the "
            f"{backend!r} backend. Set KERAS_BACKEND before keras is imported."
        )
    return backend


def wrap_train_function(run: Callable[[Any], Logs]) -> Callable[..., Any]:
    """Return `run`, a function of an iterable of steps, in the form in which the active backend's trainer
    calls its train and test functions."""
    import keras

    if keras.backend.backend() != "jax":
        return run
    from insitu.train.backends.jax.replica import as_trainer_function

    return as_trainer_function(run)
