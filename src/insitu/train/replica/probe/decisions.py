"""Decide from numbers how a model's steps combine over shards. Pure.

The numbers are those of a step on a whole batch, and of the same step on the parts of that batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica.combination import Operation, combine

Array = NDArray[np.float64]

FACTORS = (1.0, 1e3, 1e-3)
"""By which gradients are scaled, to see what a step does with them."""
_TINY = 1e-6
"""Part of a model's largest gradient. Smaller values are rounding."""
_LEAST_OF_ROUNDING = 0.1
"""Part of a difference of gradients that a rounding error must cause, for it to be one of rounding."""


@dataclass(frozen=True, slots=True)
class Movement:
    """How one variable moves in a step on the whole batch, and on its parts."""

    before: Array
    """The value from which all begin."""
    whole: Array
    """The value after the whole batch."""
    parts: Array
    """The values after each part. Shape (parts, ...)."""
    from_zero: Array
    """The values after each part if they begin from 0. Shape (parts, ...)."""
    averages: bool
    """True if parts that begin from 0 are averaged rather than added up, as means that count batches are."""


def find_operation(
    movements: Sequence[Movement], default: Operation | None, shares: Array, tolerance: float
) -> tuple[bool, Operation | None]:
    """Return (True, the first operation that explains all `movements`), or (False, None) if none does.

    `default` is what happens to a variable of which nothing is known; None adds up what parts have that begin
    from 0, and is returned as None.
    """
    candidates = [default, *(operation for operation in _IN_ORDER if operation is not default)]
    for operation in candidates:
        if all(_explains(operation, movement, shares, tolerance) for movement in movements):
            return True, operation
    return False, None


_IN_ORDER = (
    Operation.SUM_OF_CHANGES,
    Operation.MEAN,
    Operation.LARGEST,
    Operation.SMALLEST,
    Operation.FIRST,
)


def _explains(operation: Operation | None, movement: Movement, shares: Array, tolerance: float) -> bool:
    before, parts = movement.before, movement.parts
    if operation is None:
        added = combine(
            Operation.MEAN if movement.averages else Operation.SUM_OF_CHANGES, movement.from_zero, shares
        )
        predicted = before + added
    elif operation is Operation.SUM_OF_CHANGES:
        predicted = before + combine(operation, parts - before, shares)
    elif operation is Operation.FIRST and any(not are_close(parts[0], p, tolerance) for p in parts[1:]):
        return False
    else:
        predicted = combine(operation, parts, shares)
    return are_close(predicted, movement.whole, tolerance)


def are_close(one: Array, other: Array, tolerance: float) -> bool:
    """Return True if the arrays are equal but for rounding. Infinities equal themselves."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    same = one == other
    if same.all():
        return True
    if not (np.isfinite(one) | same).all() or not (np.isfinite(other) | same).all():
        return False
    scale = np.maximum(np.abs(one), np.abs(other))[~same].max()
    return bool(np.abs(one - other)[~same].max() <= tolerance * scale + 1e-7)


Gradients = Sequence[Array]
"""A gradient for each trainable variable."""


def are_finite(gradients: Gradients) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients)


def find_differences(one: Gradients, other: Gradients) -> list[float]:
    """Return the difference of the gradients of each variable, relative to their size."""
    sizes = [max(np.linalg.norm(a), np.linalg.norm(b)) for a, b in zip(one, other, strict=True)]
    floor = _TINY * max(sizes, default=0.0)
    return [
        float(np.linalg.norm(a - b) / size) if size > floor else 0.0
        for a, b, size in zip(one, other, sizes, strict=True)
    ]


def largest_difference(one: Gradients, other: Gradients) -> float:
    """Return the largest difference of the gradients of a variable, relative to their size."""
    return max(find_differences(one, other), default=0.0)


def are_rounding(differences: Sequence[float], after_nudge: Sequence[float], tolerance: float) -> bool:
    """Return True if rounding alone makes gradients differ so much: all that differ by more than `tolerance`
    do nearly so if weights are changed by a rounding error."""
    return all(
        nudged > _LEAST_OF_ROUNDING * difference
        for difference, nudged in zip(differences, after_nudge, strict=True)
        if difference > tolerance
    )


def mean_by_rows(parts: Sequence[Gradients], shares: Array) -> list[Array]:
    """Return the mean of the parts' gradients by their `shares` of the rows."""
    return [combine(Operation.MEAN, np.stack(each), shares) for each in zip(*parts, strict=True)]


def is_linear(gradients: Sequence[Gradients], tolerance: float) -> bool:
    """Return True if what a step gives to its optimizer depends on its gradients by scaling and adding alone.
    `gradients` are what it gave when they were scaled by FACTORS."""
    plain, large, small = gradients
    slopes = [
        [(a - b) / (FACTORS[1] - FACTORS[0]) for a, b in zip(large, plain, strict=True)],
        [(a - b) / (FACTORS[0] - FACTORS[2]) for a, b in zip(plain, small, strict=True)],
    ]
    size = max((float(np.linalg.norm(g)) for g in plain), default=0.0)
    steepest = max((float(np.linalg.norm(s)) for s in slopes[1]), default=0.0)
    if steepest <= tolerance * size:
        return size == 0.0
    return largest_difference(slopes[0], slopes[1]) <= tolerance
