"""One file per Keras backend behind one seam, `Replica`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.train.backends.warmup import warm_up
from insitu.train.flat import Span
from insitu.warmth import on_warm_up

on_warm_up(warm_up)

Logs = dict[str, float]


class Replica(Protocol):
    """One copy of a model, compiled so that nothing but plain arrays crosses its border.

    `gradient` and `evaluate` leave every variable as they found it: whatever happens between them and
    `apply` or `merge`, the replica still stands at the step's beginning and can do the step again.

    `floats` are flat arrays of `floats_size` elements of `floats_dtype`; `record` are float64 arrays of
    `train_record_size` or `test_record_size`, whose first element is the number of rows.
    """

    floats_size: int
    floats_dtype: np.dtype[Any]
    train_record_size: int
    test_record_size: int
    copy_out: Callable[[NDArray[Any], NDArray[Any]], object]
    """`copy_out(to, source)` takes a part of a gradient out of the backend's memory, where `floats` are
    filled like that."""

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        """Fills `floats` and `record` with what the shard's batch `data` gives."""

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """Updates the model by the mean `floats` and the `records` of all shards (one row each)."""

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """As `apply`, where the update was made elsewhere: `floats` hold, in the same places, the new values
        of the trainable variables and of the averaged state. They must not change before the next load."""

    def assign(self, floats: NDArray[Any]) -> None:
        """The part of `load` that takes `floats`, for once in a while."""

    def float_spans(self) -> list[tuple[Any, Span]]:
        """The variables that `floats` have places for, with these: trainable ones, then averaged state."""

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        """Fills `record` with the metric sums of a batch."""

    def merge(self, records: NDArray[np.float64]) -> Logs:
        """Adds the metric sums of all shards to the model's metrics."""

    def predict(self, data: Any) -> Any:
        """The model's outputs for a batch: a structure of NumPy arrays."""


def make_replica(model: Any, data: Any) -> Replica:
    """A replica of `model` on the active Keras backend. `data` is a batch, for its structure and dtypes."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        from insitu.train.backends.tensorflow import TensorFlowReplica

        return TensorFlowReplica(model, data)
    if backend == "jax":
        from insitu.train.backends.jax import JaxReplica

        return JaxReplica(model, data)
    if backend == "torch":
        from insitu.train.backends.torch import TorchReplica

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
    from insitu.train.backends.jax import as_trainer_function, keep_state_attached

    keep_state_attached(model)
    return as_trainer_function(run)
