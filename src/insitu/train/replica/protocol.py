"""The seam between a strategy and one copy of a model on a Keras backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.flat import Span

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
