"""Values of which each replica has its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from insitu.errors import TrainingError


@dataclass(frozen=True, slots=True, eq=False)
class PerReplica:
    """One leaf of a structure: `values[i]` belongs to the i-th replica of this process.

    None stands where a replica had no rows to compute it from.
    """

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(repr, self.values))})"


def values_of(leaf: Any, replicas: int) -> tuple[Any, ...]:
    """The value of each of this process' `replicas`: a leaf that isn't per replica is the same in all."""
    if not isinstance(leaf, PerReplica):
        return (leaf,) * replicas
    if len(leaf.values) != replicas:
        raise TrainingError(
            f"A value per replica must come from this strategy, which has {replicas} here. Received: one for "
            f"{len(leaf.values)}."
        )
    return leaf.values


def local_values(structure: Any, replicas: int) -> tuple[Any, ...]:
    """A structure without PerReplica for each replica of this process."""
    return tuple(
        keras.tree.map_structure(lambda leaf, i=index: values_of(leaf, replicas)[i], structure)
        for index in range(replicas)
    )


def join(structures: Sequence[Any]) -> Any:
    """One structure out of each replica's: as it is where there is one, with PerReplica leaves otherwise."""
    if len(structures) == 1:
        return structures[0]
    return keras.tree.map_structure(lambda *leaves: PerReplica(leaves), *structures)
