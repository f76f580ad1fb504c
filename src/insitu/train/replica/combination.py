"""The operations by which the values of shards become the value of the whole batch. Pure.

Most state needs none of them: gradients and averages of the forward pass travel in `floats`, sums of metrics
are added up. These are for the rest: counters, extremes, moving averages of a user's own.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Operation(StrEnum):
    """How the values that shards leave in a variable become one. Each shard starts from the same value."""

    SUM_OF_CHANGES = "sum of changes"
    """The start plus what each shard added to it: counters of rows."""
    MEAN = "mean by rows"
    """Moving averages, the mean of a batch."""
    LARGEST = "largest"
    SMALLEST = "smallest"
    FIRST = "first"
    """The value of the first shard with rows, as all shards leave the same: counters of steps."""


def combine(
    operation: Operation, values: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return one value out of `values`, of shape (shards, ...), in shard order. `shares` are the shards'
    parts of all rows; each is above 0. For SUM_OF_CHANGES values and result are the changes."""
    combined: NDArray[np.float64]
    match operation:
        case Operation.LARGEST:
            combined = values.max(0)
        case Operation.SMALLEST:
            combined = values.min(0)
        case Operation.FIRST:
            combined = values[0].copy()
        case Operation.MEAN:
            combined = values[0] * shares[0]
            for value, share in zip(values[1:], shares[1:], strict=True):
                combined = combined + value * share
        case Operation.SUM_OF_CHANGES:
            combined = values[0].copy()
            for value in values[1:]:
                combined = combined + value
    return combined
