"""Values that differ by replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from insitu.errors import TrainingError


@dataclass(frozen=True, slots=True, eq=False)
class PerReplica:
    """One leaf of a structure: `values[i]` belongs to the i-th replica of this process.

    None for a replica that had no rows to compute it from.
    """

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(repr, self.values))})"


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
