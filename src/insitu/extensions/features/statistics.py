"""Statistics of columns: one pass over each partition, merged in the order of partitions. Pure.

What a partition gives follows from its rows alone, and the merge from the partitions' order. So the numbers
are the same bits, wherever and by how many processes partitions are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.grid import Arrays

QUANTILE_POINTS = 1 << 14
"""Points that stand for the values of a partition, at most. A quantile is wrong by one of so many parts of
the rows."""


@dataclass(frozen=True, slots=True)
class MeanAndVariance:
    """Means and variances. Arrays: `count`, `mean` and `squares`, the sum of squared differences from it."""

    #: The axes of a batch that are averaged over.
    axes: tuple[int, ...]

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        return self.merge([self._of_block(block) for block in blocks])

    def _of_block(self, block: npt.NDArray[Any]) -> Arrays:
        values = _as_numbers(block).astype(np.float64)
        mean = values.mean(axis=self.axes, keepdims=True)
        squares = np.square(values - mean).sum(axis=self.axes)
        count = values.size // max(1, mean.size)
        return {"count": np.array(count), "mean": mean.reshape(squares.shape), "squares": squares}

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        found = [part for part in parts if int(part["count"])]
        if not found:
            return {"count": np.array(0), "mean": np.zeros(()), "squares": np.zeros(())}
        total = found[0]
        for part in found[1:]:
            n, m = float(total["count"]), float(part["count"])
            difference = part["mean"] - total["mean"]
            total = {
                "count": np.array(int(n + m)),
                "mean": total["mean"] + difference * (m / (n + m)),
                "squares": total["squares"] + part["squares"] + np.square(difference) * (n * m / (n + m)),
            }
        return total


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Sorted values with their weights. Arrays: `values` and `weights`, which add up to the rows.

    Up to `points` values of a partition are kept as they are. Of more, each kept value stands for the
    equally many below it.
    """

    #: Values that are kept of a partition, at most.
    points: int = QUANTILE_POINTS

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        parts = [_as_numbers(block).astype(np.float32).reshape(-1) for block in blocks]
        values = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.float32)
        if len(values) <= self.points:
            return {"values": values, "weights": np.ones(len(values), np.int64)}
        ends = (np.arange(1, self.points + 1) * len(values)) // self.points
        return {"values": values[ends - 1], "weights": np.diff(ends, prepend=0)}

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        values = np.concatenate([part["values"] for part in parts])
        weights = np.concatenate([part["weights"] for part in parts])
        order = np.argsort(values, kind="stable")
        return {"values": values[order], "weights": weights[order]}


class HasNaN(InputError):
    """Values that must be numbers aren't."""


def _as_numbers(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a block of numbers. Raises InputError for others, and for NaN."""
    values = np.asarray(block)
    if values.dtype.kind not in "iufb":
        raise InputError(f"Means, variances and quantiles are of numbers. Received: {values.dtype}")
    if values.dtype.kind == "f" and np.isnan(values).any():
        row = int(np.argwhere(np.isnan(values))[0][0])
        raise HasNaN(f"Means, variances and quantiles are of numbers. Received: NaN in row {row} of a block")
    return values
