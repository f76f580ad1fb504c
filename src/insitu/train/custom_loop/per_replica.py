"""Values that differ by replica."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from insitu.base.errors import TrainingError


@dataclass(frozen=True, slots=True, eq=False)
class PerReplica:
    """One leaf of a structure: `values[i]` belongs to the i-th replica of this process.

    None for a replica that had no rows to compute it from.

    Example:
        >>> losses = insitu.DistributedValues((0.5, 0.25))
        >>> losses.values[1]
        0.25
    """

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(repr, self.values))})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReplicaValues(PerReplica):
    """Values that a script has made for each replica. They are no rows of a batch."""


_batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The arrays that distributed datasets have given out, by identity."""


def note_batch(data: Any) -> Any:
    """Remember the arrays of a batch, and return it."""
    for leaf in keras.tree.flatten(data):
        _batches[id(leaf)] = leaf
    return data


def is_of_batch(leaf: Any) -> bool:
    """Return whether an array, or those of a PerReplica, came out of a distributed dataset."""
    if isinstance(leaf, PerReplica):
        leaf = next((value for value in leaf.values if value is not None), None)
    return leaf is not None and _batches.get(id(leaf)) is leaf


def values_per_replica(leaf: Any, replicas: int) -> tuple[Any, ...]:
    """Return the value of each of this process' `replicas`. A leaf that isn't per replica is the same in
    all."""
    if not isinstance(leaf, PerReplica):
        return (leaf,) * replicas
    if len(leaf.values) != replicas:
        raise TrainingError(
            f"A PerReplica must come from this strategy, which has {replicas} here. Received: "
            f"{len(leaf.values)} values."
        )
    return leaf.values


def make_values(structures: Sequence[Any]) -> Any:
    """Return one structure for those that a script has made for each replica of this process."""
    if len(structures) == 1:
        return structures[0]
    return keras.tree.map_structure(lambda *leaves: ReplicaValues(tuple(map(_as_value, leaves))), *structures)


def _as_value(value: Any) -> Any:
    return value if hasattr(value, "shape") else keras.ops.convert_to_tensor(value)


def local_values(structure: Any, replicas: int) -> tuple[Any, ...]:
    """Return a structure without PerReplica for each replica of this process."""
    return tuple(
        keras.tree.map_structure(lambda leaf, i=index: values_per_replica(leaf, replicas)[i], structure)
        for index in range(replicas)
    )


def merge_per_replica(structures: Sequence[Any]) -> Any:
    """Return one structure for those of all replicas: the only one as it is, several with PerReplica
    leaves."""
    if len(structures) == 1:
        return structures[0]
    return keras.tree.map_structure(lambda *leaves: PerReplica(leaves), *structures)
