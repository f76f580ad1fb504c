"""Sums, means and gathers values of all replicas of all tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.collectives import gather_bytes
from insitu.train.custom_loop.per_replica import values_of

ReduceOp = Literal["sum", "mean"]
_LENGTH = 8
"""Bytes of the number before each frame's header."""

Row = list[NDArray[Any] | None]
"""One replica's value of each leaf, None where it has none."""


def reduce_values(group: Group, reduce_op: str, structure: Any, axis: int | None) -> Any:
    """See `Strategy.reduce`. Collective."""
    op = str(getattr(reduce_op, "value", reduce_op)).lower()
    if op not in ("sum", "mean") or axis not in (None, 0):
        raise TrainingError(
            f"reduce takes 'sum' or 'mean', and axis None or 0. Received: {reduce_op!r}, axis={axis}"
        )
    rows = _everyones(group, structure)
    leaves = [_reduced(op, [row[i] for row in rows], axis) for i in range(len(rows[0]))]
    return keras.tree.pack_sequence_as(structure, leaves)


def _reduced(op: str, values: Sequence[NDArray[Any] | None], axis: int | None) -> Any:
    given = [v for v in values if v is not None]
    if not given:
        raise TrainingError("reduce needs a value of at least one replica. Received: none.")
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
                f"{total.shape} and {other.shape}."
            )
        total = total + other
    return total / total.dtype.type(count) if op == "mean" else total


def gather_values(group: Group, structure: Any, axis: int) -> Any:
    """See `Strategy.gather`. Collective."""
    rows = _everyones(group, structure)
    leaves = []
    for index in range(len(rows[0])):
        given = [row[index] for row in rows]
        present = [v for v in given if v is not None]
        if not present or present[0].ndim == 0:
            raise TrainingError("gather joins arrays along an axis. Received: scalars, or no value at all.")
        leaves.append(np.concatenate(present, axis))
    return keras.tree.pack_sequence_as(structure, leaves)


def _everyones(group: Group, structure: Any) -> list[Row]:
    """Each replica's leaves, in shard order."""
    replicas = len(group.shards)
    columns = [values_of(leaf, replicas) for leaf in keras.tree.flatten(structure)]
    if not columns:
        raise TrainingError(
            "A structure without values can't be reduced or gathered. Received: an empty one."
        )
    own = [[None if v is None else _to_numpy(v) for v in row] for row in zip(*columns, strict=True)]
    if group.size == 1:
        return own
    rows = [_unpack(data) for data in gather_bytes(group, [_pack(row) for row in own])]
    if any(len(row) != len(columns) for row in rows):
        raise TrainingError(
            "Every task must reduce and gather the same structures. Received: different ones."
        )
    return rows


def _to_numpy(value: Any) -> NDArray[Any]:
    array = np.asarray(value if isinstance(value, np.ndarray) else keras.ops.convert_to_numpy(value))
    # NumPy can neither add nor name the narrow kinds of backends on its own.
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def _pack(row: Row) -> bytes:
    header = [None if value is None else [value.dtype.str, list(value.shape)] for value in row]
    head = json.dumps(header).encode()
    parts = [np.ascontiguousarray(value).tobytes() for value in row if value is not None]
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *parts])


def _unpack(data: bytes) -> Row:
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    row: Row = []
    for described in json.loads(data[_LENGTH:start]):
        if described is None:
            row.append(None)
            continue
        dtype, shape = np.dtype(described[0]), described[1]
        count = int(np.prod(shape))
        row.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return row
