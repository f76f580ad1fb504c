"""Sum, average and gather values of all replicas of all tasks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.base.serialization import from_bytes, to_bytes
from insitu.exchange import Group
from insitu.train.collectives import gather_bytes, gather_counts, pack_leaves
from insitu.train.custom_loop.per_replica import values_per_replica
from insitu.train.elastic import Membership
from insitu.train.replica import ModelState, broadcast_state


class ReduceOp(enum.Enum):
    """How values of replicas are combined, as `tf.distribute.ReduceOp`.

    Example:
        >>> strategy = insitu.get_strategy()
        >>> float(strategy.reduce(insitu.ReduceOp.SUM, np.array([1.0, 2.0]), axis=0))
        3.0
    """

    SUM = "SUM"
    MEAN = "MEAN"


AnyReduceOp = ReduceOp | Literal["sum", "mean", "SUM", "MEAN"]
"""Argument of calls: a ReduceOp of insitu or of TensorFlow, or its name."""

Row = list[NDArray[Any] | None]
"""One replica's value of each leaf, None if it has none."""


def reduce_values(group: Group, reduce_op: AnyReduceOp, structure: Any, axis: int | None) -> Any:
    """See `Strategy.reduce`. Collective."""
    op = str(getattr(reduce_op, "value", reduce_op)).lower()
    if op not in ("sum", "mean") or axis not in (None, 0):
        raise TrainingError(
            f"reduce takes 'sum' or 'mean', and axis None or 0. Received: {reduce_op!r}, axis={axis}"
        )
    rows = _gather_leaves(group, structure)
    leaves = [_reduce(op, [row[i] for row in rows], axis) for i in range(len(rows[0]))]
    return pack_leaves(structure, [_to_tensor(v) for v in leaves])


def _to_tensor(value: Any) -> Any:
    """Return a tensor, or the array if the backend has no such dtype, as JAX of 64 bits: a large
    number would come out as another."""
    tensor = keras.ops.convert_to_tensor(value)
    return tensor if keras.backend.standardize_dtype(tensor.dtype) == str(value.dtype) else value


def _reduce(op: str, values: Sequence[NDArray[Any] | None], axis: int | None) -> Any:
    given = [v for v in values if v is not None]
    if not given:
        raise TrainingError(
            "reduce needs a value of at least one replica. Received: None from each. Return a value from the "
            "step where a replica has rows."
        )
    if op == "mean" and given[0].dtype.kind in "iub":
        given = [v.astype(np.float64) for v in given]
    count = len(given)
    if axis is not None:
        count = sum(len(v) for v in given)
        given = [v.sum(axis=0, dtype=v.dtype) for v in given]
    total = given[0]
    for other in given[1:]:
        if other.shape != total.shape:
            raise TrainingError(
                "Values that are reduced must have the same shape in each replica. Received: "
                f"{total.shape} and {other.shape}. Pass axis=0 where the numbers of rows differ."
            )
        total = total + other
    return total / total.dtype.type(count) if op == "mean" else total


def gather_values(group: Group, structure: Any, axis: int) -> Any:
    """See `Strategy.gather`. Collective."""
    rows = _gather_leaves(group, structure)
    leaves = []
    for index in range(len(rows[0])):
        given = [row[index] for row in rows]
        present = [v for v in given if v is not None]
        if not present or present[0].ndim == 0:
            received = "None from each replica" if not present else f"a scalar of dtype {present[0].dtype}"
            raise TrainingError(
                f"gather joins arrays along an axis. Received: {received}. Give each value an axis, as by "
                "reshape(value, (1,)), or use reduce."
            )
        leaves.append(_to_tensor(np.concatenate(present, axis)))
    return pack_leaves(structure, leaves)


def _gather_leaves(group: Group, structure: Any) -> list[Row]:
    """Return each replica's leaves, in shard order. Collective."""
    replicas = len(group.shards)
    columns = [values_per_replica(leaf, replicas) for leaf in keras.tree.flatten(structure)]
    if not columns:
        raise TrainingError(
            f"reduce and gather take a structure with at least one value. Received: {structure!r}"
        )
    own = [[None if v is None else _to_numpy(v) for v in row] for row in zip(*columns, strict=True)]
    if group.size == 1:
        return own
    rows: list[Row] = [from_bytes(data) for data in gather_bytes(group, [to_bytes(row) for row in own])]
    if any(len(row) != len(columns) for row in rows):
        raise TrainingError(
            "Every task must reduce and gather the same structures. Received: structures of "
            f"{sorted({len(row) for row in rows})} values."
        )
    return rows


def _to_numpy(value: Any) -> NDArray[Any]:
    array = np.asarray(value if isinstance(value, np.ndarray) else keras.ops.convert_to_numpy(value))
    # NumPy can neither add nor name the narrow kinds of backends on its own.
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


# Sum the gradients of custom loops over the exchange


class ExchangeAggregation:
    """See `LoopAggregation`. Each update uses the sum over all replicas of all tasks."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.replicas = membership.num_shards

    def count_step_rows(self, rows: Sequence[int]) -> tuple[list[int], int]:
        group = self._membership.group()
        counts = rows if group.size == 1 else gather_counts(group, rows)
        return [sum(counts)] * len(rows), sum(count > 0 for count in counts)

    def synchronize(self, variables: Sequence[Any]) -> None:
        nothing = ModelState((), (), (), (), (), (), ())
        broadcast_state(replace(nothing, trainable=tuple(variables)), self._membership.group())
