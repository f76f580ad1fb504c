"""The interface between a strategy and one copy of a model on a Keras backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.flat import Span
from insitu.train.replica.loss_totals import BatchTotals, LossCounts

Logs = dict[str, float]


class Replica(Protocol):
    """One copy of a model, compiled so that nothing but plain arrays crosses its border.

    `gradient` and `evaluate` leave every variable as they found it: whatever happens between them and
    `apply` or `merge`, the replica is still at the step's beginning and can repeat the step.

    `floats` are flat arrays of `floats_size` elements of `floats_dtype`; `record` are float64 arrays of
    `train_record_size` or `test_record_size`, whose first element is the number of rows.
    """

    floats_size: int
    floats_dtype: np.dtype[Any]
    train_record_size: int
    test_record_size: int
    plan_number: int
    """A number that is the same in all tasks, if their steps combine in the same way."""
    seeds_size: int
    """The size of what `run_with_seeds_of` returns of the seed generators."""
    copy_out: Callable[[NDArray[Any], NDArray[Any]], object]
    """`copy_out(to, source)` takes a part of a gradient out of the backend's memory, if `floats` are filled
    like that."""

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        """Fill `floats` and `record` with the results of the shard's batch `data`.

        Raises NeedsTotals, in the first step, if losses need `totals` that must be set before.
        """

    def watch_weights(self, variables: Sequence[Any]) -> bool:
        """Return True if each later call of `gradient` keeps the values that `variables` have in it, for
        `take_watched`. False: read the variables where they are."""

    def take_watched(self) -> Sequence[NDArray[Any]]:
        """Return the values of the watched variables in the last call of `gradient`, and forget them.
        They are valid until the next update. Empty without a call since the last one of this."""

    def keep_own_losses(self, *, training: bool) -> None:
        """Let losses divide by what counts in the rows of this replica alone, from now on."""

    def needs_totals(self, *, training: bool) -> bool:
        """Return True once it is known that steps need `set_totals`."""

    def find_out(self, *, training: bool) -> None:
        """Find out what a step does, if this replica has done none. Raises NeedsTotals as `gradient`."""

    def count_losses(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        """Return what a shard's batch adds to the totals of a step, without its rows. For no data: zeros, and
        rows that show their shape."""

    def set_totals(self, batch: BatchTotals, *, training: bool) -> None:
        """Take what losses know of the batch in the step that comes next: see `loss_totals`. Its `start` has
        a number for each shard."""

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """Update the model by the mean `floats` and the `records` of all shards (one row each)."""

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        """Do as `apply` for an update that was made elsewhere: `floats` hold the new values of the trainable
        variables and of the averaged state. They must not change before the next load."""

    def assign(self, floats: NDArray[Any]) -> None:
        """Do the part of `load` that concerns `floats`. For rare use."""

    def float_spans(self) -> list[tuple[Any, Span]]:
        """Return the variables with their spans in `floats`: trainable ones, then averaged state."""

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        """Fill `record` with the metric sums of a batch. Raises NeedsTotals as `gradient`."""

    def merge(self, records: NDArray[np.float64]) -> Logs:
        """Add the metric sums of all shards to the model's metrics."""

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for a batch: a structure of NumPy arrays."""

    def run_with_seeds_of(self, shard: int, run: Callable[[], Any]) -> tuple[Any, NDArray[np.float64]]:
        """Return what `run` returns with random numbers of the shard, and the positions to which it moves the
        seed generators, for `assign_seeds`. They are left as they were."""

    def assign_seeds(self, values: NDArray[np.float64]) -> None:
        """Move the seed generators, as `run_with_seeds_of` says, on whichever replica that ran."""
