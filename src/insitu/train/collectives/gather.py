"""Gather counts, bytes and rows whose number differs by shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError
from insitu.exchange import Group


def squeeze_shards(array: NDArray[Any]) -> NDArray[Any]:
    """Return `array`, of shape (shards of this task, ...), as a group takes it: a task with one shard passes
    no leading axis."""
    return array[0] if len(array) == 1 else array


def barrier_token(group: Group) -> NDArray[Any]:
    """Return what a task contributes to a gather that serves as a barrier only."""
    return squeeze_shards(np.zeros((len(group.shards), 1), np.uint8))


def gather_sizes(group: Group, size: int) -> list[int]:
    """Return the `size` that each shard's task contributes, in shard order."""
    return gather_counts(group, [size] * len(group.shards))


def gather_counts(group: Group, own: Sequence[int]) -> list[int]:
    """Return every shard's number, in shard order; `own` are those of this task's shards."""
    counts: list[int] = (
        group.all_gather(squeeze_shards(np.array(own, np.int64)[:, None])).reshape(-1).tolist()
    )
    return counts


def gather_bytes(group: Group, own: Sequence[bytes]) -> list[bytes]:
    """Return the bytes of every shard, in shard order; `own` are those of this task's shards."""
    rows = [np.frombuffer(data, np.uint8) if data else None for data in own]
    all_counts = gather_counts(group, [len(data) for data in own])
    if not any(all_counts):
        return [b""] * len(all_counts)
    joined = _gather_leaf(group, rows, np.zeros(1, np.uint8), all_counts)
    stops = np.cumsum(all_counts)
    return [joined[stop - count : stop].tobytes() for stop, count in zip(stops, all_counts, strict=True)]


def gather_rows(group: Group, outputs: Sequence[Any], example: Any) -> Any:
    """Return the rows of all shards of all tasks, concatenated in shard order, the same in each task.

    `outputs[i]` is a structure of arrays, rows first, for the i-th shard of this task, or None if it has no
    rows; `example` is such a structure of any one row. Structures and dtypes must agree. Raises InputError if
    rows' shapes don't.
    """
    counts = [0 if output is None else len(keras.tree.flatten(output)[0]) for output in outputs]
    all_counts = gather_counts(group, counts)
    leaves = []
    for index, like in enumerate(keras.tree.flatten(example)):
        own = [None if output is None else keras.tree.flatten(output)[index] for output in outputs]
        leaves.append(_gather_leaf(group, own, np.asarray(like), all_counts))
    return pack_leaves(example, leaves)


def pack_leaves(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return `leaves`, in the order of `keras.tree.flatten`, in a structure like this one.

    Keras sorts the keys of dictionaries for that order. On PyTorch `pack_sequence_as` leaves them sorted, and
    a model may read values by position; `map_structure` visits them unsorted, so it can't count leaves.
    """
    packed = keras.tree.pack_sequence_as(structure, leaves)
    return keras.tree.map_structure(lambda _, leaf: leaf, structure, packed)


def _check_row_shape(rows: Any, like: NDArray[Any]) -> None:
    if np.shape(rows)[1:] != like.shape[1:]:
        raise InputError(
            "All rows that are joined must have one shape. Received: outputs with rows of shape "
            f"{np.shape(rows)[1:]}, after rows of shape {like.shape[1:]}. Pad the inputs to one length, or "
            "predict those of each length in a call of their own."
        )


def _gather_leaf(group: Group, own: Sequence[Any], like: NDArray[Any], counts: list[int]) -> NDArray[Any]:
    """Gather one leaf. Rows travel as bytes in words of 8, padded to the longest shard's."""
    row_bytes = like[:1].nbytes
    words = -(-max(counts) * row_bytes // 8)
    padded = np.zeros((len(own), words), np.int64)
    for target, rows in zip(padded, own, strict=True):
        if rows is not None:
            _check_row_shape(rows, like)
            flat = np.ascontiguousarray(rows, dtype=like.dtype).reshape(-1).view(np.uint8)
            target.view(np.uint8)[: flat.size] = flat
    gathered = group.all_gather(squeeze_shards(padded))
    return np.concatenate(
        [
            row.view(np.uint8)[: count * row_bytes].view(like.dtype).reshape(count, *like.shape[1:])
            for row, count in zip(gathered, counts, strict=True)
        ]
    )
