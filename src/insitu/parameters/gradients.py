"""The gradients of pushes: how they are checked, and how those of one step are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError, NotFinite
from insitu.exchange import aligned_empty
from insitu.exchange.plan import PAGE, Factors, Reducer, compute_factors, split_chunks
from insitu.parameters.tables import Table

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one push."""

    #: The server's own flat gradient of each group; empty if the push has none.
    dense: Mapping[str, Array] = field(default_factory=dict)
    #: For each table, keys int64[n] and gradients [n, width].
    rows: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    #: Whether the worker has checked that all of `dense` is finite.
    finite: bool = False
    #: The worker's record of its rows for the others, float64[size], once the push has become part of an
    #: update (mode sync).
    record: Array | None = None


def check_nan_policy(nan: object) -> None:
    """Raise InputError unless `nan` is "refuse" or "clip"."""
    if nan not in ("refuse", "clip"):
        raise InputError(f'nan must be "refuse" or "clip". Received: {nan!r}')


def check_dense(group: str, flat: Array, own: Array | None, server: int) -> None:
    """Raise InputError unless a group's gradient has the shape and dtype of the server's `own` values."""
    if own is None or flat.shape != own.shape or flat.dtype != own.dtype:
        expected = "nothing" if own is None else f"{own.dtype.name}{list(own.shape)}"
        raise InputError(
            f"A push to server {server} must bring {expected} for its {group} variables. "
            f"Received: {flat.dtype.name}{list(flat.shape)}"
        )


def check_rows(table: Table, keys: Array, gradients: Array) -> None:
    """Raise InputError unless keys and gradients fit a table."""
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise InputError(
            f"Keys of table {table.name!r} must be int64[n]. Received: {keys.dtype.name}{list(keys.shape)}"
        )
    if gradients.dtype.name != table.dtype or gradients.shape != (len(keys), table.width):
        raise InputError(
            f"Gradients of table {table.name!r} must be {table.dtype}[{len(keys)}, {table.width}], a row for "
            f"each key. Received: {gradients.dtype.name}{list(gradients.shape)}"
        )


def clip_nonfinite(values: Array) -> tuple[Array, int]:
    """Return `values` with 0 for each element that isn't finite, and how many these are."""
    finite = np.isfinite(values)
    return np.where(finite, values, values.dtype.type(0)), int((~finite).sum())


def refuse_nonfinite(values: Array, where: str) -> NotFinite:
    """Return the error for a gradient that isn't finite. `where` names its variable or table."""
    return NotFinite(
        f"A gradient holds {int((~np.isfinite(values)).sum())} values that are NaN or infinite: {where}. It "
        'was not applied. Lower the learning rate, clip gradients, or set nan="clip" to take them as 0'
    )


class GradientAverager:
    """Averages the gradients of a step, weighted by their rows and added in shard order.

    It uses the exchange's own arithmetic, so the bits are those of MultiWorkerMirroredStrategy.
    """

    def __init__(self) -> None:
        #: The result's memory by group, kept from step to step.
        self._means: dict[str, Array] = {}

    def average_dense(
        self, gradients: Sequence[Gradients], weights: Sequence[float], values: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the mean for each group of `values`, valid until the next call; groups without weight are
        left out."""
        means = {}
        for group, own in values.items():
            # A shard without rows may have sent nothing: it has weight 0.
            sent = [(g.dense[group], w) for g, w in zip(gradients, weights, strict=True) if group in g.dense]
            factors = compute_factors([w for _, w in sent], own.dtype)
            if factors is not None:
                means[group] = self._average(group, [flat for flat, _ in sent], factors, own)
        return means

    def _average(self, group: str, flats: Sequence[Array], factors: Factors, like: Array) -> Array:
        if group not in self._means:
            self._means[group] = aligned_empty(like.shape, like.dtype)
        mean = self._means[group]
        size = PAGE * 16
        reducer = Reducer("weighted_mean", like.dtype, len(flats), size)
        for low, high in split_chunks(0, len(mean), size):
            reducer.reduce([flat[low:high] for flat in flats], mean[low:high], factors)
        return mean

    @staticmethod
    def average_rows(
        gradients: Sequence[Gradients], weights: Sequence[float]
    ) -> Iterator[tuple[str, Array, Array]]:
        """Yield (table, keys, gradients) of each table. Keys repeat: the table adds up their gradients."""
        for name in dict.fromkeys(name for one in gradients for name in one.rows):
            sent = [(g.rows[name], w) for g, w in zip(gradients, weights, strict=True) if name in g.rows]
            factors = compute_factors(weights, sent[0][0][1].dtype)
            if factors is None or not any(w for _, w in sent):
                continue
            by_weight = dict(zip(weights, factors, strict=True))
            keys = np.concatenate([keys for (keys, _), w in sent if w])
            yield name, keys, np.concatenate([rows * by_weight[w] for (_, rows), w in sent if w])
