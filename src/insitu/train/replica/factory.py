"""Makes the replica of the active Keras backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from insitu.errors import TrainingError
from insitu.preload_hooks import register_preload
from insitu.train.replica.preload import warm_up
from insitu.train.replica.protocol import Logs, Replica

register_preload(warm_up)


def make_replica(model: Any, data: Any) -> Replica:
    """A replica of `model` on the active Keras backend. `data` is a batch, for its structure and dtypes."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        from insitu.train.replica.tensorflow import TensorFlowReplica

        return TensorFlowReplica(model, data)
    if backend == "jax":
        from insitu.train.replica.jax import JaxReplica

        return JaxReplica(model, data)
    if backend == "torch":
        from insitu.train.replica.torch import TorchReplica

        return TorchReplica(model, data)
    raise TrainingError(
        "A strategy runs on the TensorFlow, JAX and PyTorch backends of Keras. Received: the "
        f"{backend!r} backend. Set KERAS_BACKEND before keras is imported."
    )


def fit_into_trainer(model: Any, run: Callable[[Any], Logs]) -> Callable[..., Any]:
    """`run`, a function of an iterable of steps, as the trainer of the active backend calls its train and
    test functions; the trainer of `model` is made ready for it."""
    import keras

    if keras.backend.backend() != "jax":
        return run
    from insitu.train.replica.jax import as_trainer_function, keep_state_attached

    keep_state_attached(model)
    return as_trainer_function(run)
